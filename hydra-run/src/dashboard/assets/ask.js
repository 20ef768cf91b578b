// One prompt, continued by the models of tasks that have ended: a column for each task.

import { $, colour, el } from "/format.js";
import { textOf, hasToken } from "/server.js";
import { isWanted } from "/settings.js";

let run = null;
/** Whether the server generates texts: that of a run in progress does not. */
let generates = false;
let tasks = [];
let ticket = 0;
/** The turns of a chat by task name. */
const turns = new Map();

/** Most of the tasks that answer one prompt: models generate one after the other. */
const MOST = 6;

export function begin(name, answers) {
  if (run !== name) {
    ticket++;
    turns.clear();
    $("asked").replaceChildren();
    delete $("asked").dataset.tasks;
  }
  run = name;
  generates = answers;
}

/** Shows the box if a task of the leaderboard has a language model. */
export function draw(all) {
  const isText = ({ validation, test }) => [validation, test].some((result) => result?.perplexity);
  tasks = all.filter((task) => task.model_dir && isText(task) && isWanted(task)).slice(0, MOST);
  $("asking-section").hidden = !tasks.length || !generates || !hasToken();
}

async function ask(text, isChat) {
  const own = ++ticket;
  const asked = tasks.map(({ name }) => name);
  const cells = asked.map(() => el("td", { className: "sample" }, "…"));
  const head = (name) => el("th", { className: "text" }, el("span", { className: "swatch", style: `background: ${colour(name)}` }), name);
  const row = el("tr", {}, el("td", { className: "sample prompt" }, text), ...cells);
  const isSame = $("asked").dataset.tasks === JSON.stringify(asked);
  if (!isSame) {
    turns.clear();
    $("asked").replaceChildren(el("thead", {}, el("tr", {}, el("th", { className: "text" }, "prompt"), ...asked.map(head))), el("tbody"));
    $("asked").dataset.tasks = JSON.stringify(asked);
  }
  $("asked").querySelector("tbody").append(row);
  for (const [place, task] of asked.entries()) {
    const before = isChat ? (turns.get(task) ?? []) : [];
    const messages = [...before, { role: "user", content: text }];
    const request = { task, max_new_tokens: Number($("asking-tokens").value), ...(isChat ? { messages } : { prompt: text }) };
    try {
      const made = await textOf(run, request);
      if (own !== ticket) return;
      cells[place].textContent = made.text ?? JSON.stringify(made.token_ids);
      if (isChat) turns.set(task, [...messages, { role: "assistant", content: made.text }]);
    } catch (error) {
      if (own !== ticket) return;
      cells[place].textContent = error.message;
    }
  }
}

export function listen() {
  $("asking-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = $("asking-text").value;
    if (!text) return;
    $("asking-yes").disabled = true;
    await ask(text, $("asking-chat").checked).finally(() => ($("asking-yes").disabled = false));
  });
}
