// The leaderboard: tasks in their order, with their states, their descent, and what can be asked of them.

import { $, colour, el, loss, nameTasks } from "/format.js";
import { ask, hasToken } from "/server.js";
import * as curves from "/curves.js";

const HEADS = ["", "task", "state", "minibatches", "training loss", "validation", "test", "from", ""];
const TEXT = [1, 2, 7];
let last = null;

export function draw(run, news) {
  last = [run, news];
  nameTasks(news.tasks.map((task) => task.name).toSorted());
  const counts = Map.groupBy(news.tasks, (task) => task.doing ?? task.state);
  $("counts").textContent = [...counts].map(([state, tasks]) => `${tasks.length} ${state}`).join(", ");
  const head = el("tr", {}, ...HEADS.map((text, place) => cell("th", text, TEXT.includes(place))));
  const focused = document.activeElement?.dataset?.act;
  $("tasks").replaceChildren(el("thead", {}, head), el("tbody", {}, ...news.tasks.flatMap((task) => rows(run, news, task))));
  if (focused) document.querySelector(`[data-act="${CSS.escape(focused)}"]`)?.focus();
  $("steering").textContent = steering(news);
}

function steering(news) {
  if (news.state !== "running") return "Nothing runs here: tasks are paused, resumed, stopped and forked while a run goes on.";
  if (!news.steered) return "This run has no socket, so its tasks cannot be steered from here.";
  return hasToken() ? "" : "To steer tasks, open the address that was printed when the server began: it has the token.";
}

const cell = (name, text, left = false) => el(name, { className: left ? "text" : "" }, text);

function rows(run, news, task) {
  const share = task.steps_in_all ? task.steps / task.steps_in_all : 0;
  const progress = el("progress", { value: share, max: 1, title: `${(100 * share).toFixed(0)} %` });
  progress.setAttribute("aria-label", `${task.name}: ${(100 * share).toFixed(0)} percent`);
  const steps = el("td", {}, `${task.steps}${task.steps_in_all ? ` / ${task.steps_in_all}` : ""} `, progress);
  const swatch = el("span", { className: "swatch" });
  swatch.style.background = colour(task.name);
  const act = `show ${task.name}`;
  const name = el("button", { type: "button", className: "name", data: { act }, title: "show or hide its curves" }, swatch, task.name);
  name.setAttribute("aria-pressed", curves.shows(task.name));
  name.addEventListener("click", () => {
    curves.toggle(task.name);
    draw(...last);
  });
  const row = el("tr", { className: curves.shows(task.name) ? "" : "off", data: { task: task.name } },
    cell("td", task.rank ?? "–"), el("td", { className: "text" }, name), cell("td", task.doing ?? task.state, true), steps,
    cell("td", loss(task.training_loss)), cell("td", validation(task)), cell("td", result(task.test)),
    cell("td", descent(task), true), el("td", {}, actions(run, news, task)));
  if (!task.error) return [row];
  return [row, el("tr", {}, el("td"), el("td", { className: "why", colSpan: HEADS.length - 1 }, task.error))];
}

function result(evaluation) {
  if (!evaluation) return "–";
  const { loss: value, perplexity, metrics } = evaluation;
  const measured = Object.entries(metrics ?? {}).map(([name, figure]) => `${name} ${Number(figure).toPrecision(4)}`);
  const besides = [...(perplexity ? [`ppl ${perplexity.toPrecision(5)}`] : []), ...measured];
  return besides.length ? `${loss(value)} (${besides.join(", ")})` : loss(value);
}

function validation(task) {
  if (task.validation) return result(task.validation);
  const best = task.evaluations.reduce((a, b) => (a && a[1].loss <= b[1].loss ? a : b), null);
  return best ? `${result(best[1])} at ${best[0]}` : "–";
}

function descent(task) {
  const parent = task.parent?.task ?? task.parent;
  const at = task.forked_at ?? task.parent?.at;
  return parent ? `${parent}${at !== null && at !== undefined ? ` at ${at}` : ""}` : "";
}

function actions(run, news, task) {
  const can = news.steered && hasToken();
  const open = !["done", "failed", "stopped", "left out", "deleted"].includes(task.state);
  const acts = [
    task.state === "paused" ? ["resume", open] : ["pause", open],
    ["stop", open],
    ["fork", task.state !== "failed" && task.state !== "left out"],
  ];
  const button = ([what, may]) => {
    const made = el("button", { type: "button", disabled: !can || !may, data: { act: `${what} ${task.name}` } }, what);
    made.setAttribute("aria-label", `${what} ${task.name}`);
    made.addEventListener("click", () => (what === "pause" || what === "resume" ? at_once(run, what, task) : dialog(run, what, task)));
    return made;
  };
  return el("span", { className: "acts" }, ...acts.map(button));
}

async function at_once(run, command, task) {
  try {
    says(`${command} ${task.name}: asked`);
    const reply = await ask(run, { command, task: task.name });
    says(`${command} ${task.name}: done${place(reply)}`);
  } catch (error) {
    says(error.message);
  }
}

const place = (reply) => (Number.isInteger(reply.at) ? ` at minibatch ${reply.at}` : "");
const says = (text) => ($("steering").textContent = text);

function dialog(run, command, task) {
  const is_fork = command === "fork";
  $("ask-title").textContent = `${command} ${task.name}`;
  $("ask-says").textContent = is_fork
    ? "A new task begins with this one's weights, and trains beside it."
    : "It ends after the minibatch that is under way; its weights are written.";
  $("ask-fork").hidden = !is_fork;
  $("ask-problem").hidden = true;
  $("ask-yes").textContent = command;
  $("ask-yes").disabled = false;
  $("ask-form").onsubmit = async (event) => {
    event.preventDefault();
    $("ask-yes").disabled = true;
    try {
      const reply = await ask(run, is_fork ? fork(task) : { command, task: task.name });
      $("ask").close();
      says(is_fork ? `${reply.task} was forked from ${task.name}${place(reply)}` : `${task.name} was stopped${place(reply)}`);
    } catch (error) {
      $("ask-problem").textContent = error.message;
      $("ask-problem").hidden = false;
      $("ask-yes").disabled = false;
    }
  };
  $("ask-no").onclick = () => $("ask").close();
  $("ask").showModal();
}

function fork(task) {
  const request = { command: "fork", task: task.name, changes: {} };
  for (const line of $("fork-changes").value.split("\n").map((line) => line.trim()).filter(Boolean)) {
    const [name, value] = line.split(/[=:](.*)/s).map((part) => part?.trim());
    if (!value) throw new Error(`\`${line}\` is no change: expected a name and a value, such as lr=1e-4`);
    request.changes[name.replace(/^-+/, "")] = value;
  }
  if ($("fork-at").value) request.at = Number($("fork-at").value);
  if ($("fork-name").value) request.name = $("fork-name").value;
  if ($("fork-weights").checked) request.weights_only = true;
  return request;
}
