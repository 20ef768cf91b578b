// The page: one run at a time, drawn whole and then followed.

import * as curves from "/curves.js";
import * as devices from "/devices.js";
import * as memory from "/memory.js";
import * as parallel from "/parallel.js";
import * as settings from "/settings.js";
import * as tasks from "/tasks.js";
import { $, el, forgetTasks, nameTasks, seconds } from "/format.js";
import { follow, reportOf, runs, timeline, whole } from "/server.js";

/** Milliseconds between looks at the list of runs and at the devices. */
const LIST = 5000;
const DEVICES = 2000;

let run = null;
let events = null;
let now = null;
let ticket = 0;

function problem(text) {
  $("problem").textContent = text ?? "";
  $("problem").hidden = !text;
}

async function list() {
  const all = await runs();
  const ages = { running: "running", ended: "ended", stopped: "not running" };
  const options = all.map(({ name, state }) => el("option", { value: name, textContent: `${name} (${ages[state]})` }));
  if (JSON.stringify(all.map(({ name, state }) => [name, state])) !== $("run").dataset.shown) {
    $("run").replaceChildren(...options);
    $("run").dataset.shown = JSON.stringify(all.map(({ name, state }) => [name, state]));
  }
  const wanted = run ?? new URLSearchParams(location.hash.slice(1)).get("run");
  const newest = all.toSorted((a, b) => (b.state === "running") - (a.state === "running") || (b.written ?? 0) - (a.written ?? 0))[0];
  const chosen = all.find(({ name }) => name === wanted) ?? newest;
  if (chosen) $("run").value = chosen.name;
  if (!all.length) problem("No run is here yet: it appears when it begins.");
  if (chosen && chosen.name !== run) await show(chosen.name);
}

async function show(name) {
  const own = ++ticket;
  run = name;
  events?.close();
  history.replaceState(null, "", `#${new URLSearchParams({ run })}`);
  document.title = `Hydra: ${name}`;
  const read = await whole(name);
  if (own !== ticket) return;
  forgetTasks();
  nameTasks(read.tasks.map((task) => task.name).toSorted());
  curves.begin(read.curves);
  memory.begin(read.memory);
  draw(read);
  events = follow(name, read.from, {
    news: (read) => own === ticket && news(read),
    begin: () => own === ticket && show(name),
    lost: () => problem("The server does not answer: the run's program has ended, or the connection is lost. What is drawn is what was known."),
    back: () => problem(null),
  });
  await look();
}

function news(read) {
  if (curves.news(read.lines)) return show(run);
  memory.news(read.lines);
  draw(read);
}

function draw(read) {
  now = read;
  problem(null);
  const says = { running: "running", ended: "ended", stopped: "stopped: hydra resume goes on with it" };
  // What else a search will ask for, nobody knows yet.
  const asked = read.search ? `; ${read.search.trained} of ${read.search.asked} minibatches asked for so far` : "";
  $("state").textContent = `${says[read.state]}${read.at_s ? `, ${seconds(read.at_s)}` : ""}${asked}`;
  $("report").hidden = !read.report;
  $("report").href = reportOf(run);
  curves.lengths(read.tasks);
  compare(read);
  memory.draw();
}

/** What filters and the choice of colours change. */
function compare(read) {
  settings.draw(run, read.tasks);
  curves.filter(read.tasks.filter((task) => !settings.isWanted(task)).map((task) => task.name));
  curves.draw();
  tasks.draw(run, read);
  parallel.draw(read.tasks);
}

async function look() {
  if (run && !document.hidden) devices.draw(await timeline(run));
}

/** Does something again and again; what fails once is tried again. */
function again(what, every) {
  const once = () => what().catch((error) => problem(error.message)).finally(() => setTimeout(once, every));
  once();
}

const THEMES = ["system", "light", "dark"];

function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = `theme: ${name}`;
  localStorage.setItem("theme", name);
  curves.repaint();
  memory.repaint();
  devices.draw();
}

$("theme").addEventListener("click", () => {
  theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(document.documentElement.dataset.theme));
$("run").addEventListener("change", () => show($("run").value).catch((error) => problem(error.message)));
function recompare() {
  if (!now) return;
  compare(now);
  devices.draw();
}
[curves, devices, memory].forEach((part) => part.listen());
[settings, tasks].forEach((part) => part.listen(recompare));
addEventListener("resize", recompare);
theme(localStorage.getItem("theme") ?? "system");
again(list, LIST);
again(() => (now && now.state === "running" ? look() : Promise.resolve()), DEVICES);
