// The dashboard: loads one run as a snapshot and then follows its events.

import * as asking from "/ask.js";
import * as curves from "/curves.js";
import * as devices from "/devices.js";
import * as memory from "/memory.js";
import * as parallel from "/parallel.js";
import * as samples from "/samples.js";
import * as settings from "/settings.js";
import * as tasks from "/tasks.js";
import { $, el, forgetTasks, nameTasks, seconds } from "/format.js";
import { follow, reportOf, runs, timeline, whole } from "/server.js";

/** Milliseconds between requests of the list of runs, and of the timeline of the devices. */
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
  const states = { running: "running", ended: "ended", stopped: "not running" };
  const options = all.map(({ name, state }) => el("option", { value: name, textContent: `${name} (${states[state]})` }));
  if (JSON.stringify(all.map(({ name, state }) => [name, state])) !== $("run").dataset.shown) {
    $("run").replaceChildren(...options);
    $("run").dataset.shown = JSON.stringify(all.map(({ name, state }) => [name, state]));
  }
  const wanted = run ?? new URLSearchParams(location.hash.slice(1)).get("run");
  const newest = all.toSorted((a, b) => (b.state === "running") - (a.state === "running") || (b.written ?? 0) - (a.written ?? 0))[0];
  const chosen = all.find(({ name }) => name === wanted) ?? newest;
  if (chosen) $("run").value = chosen.name;
  if (!all.length) problem("No run yet. Runs appear here when they start.");
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
  samples.begin(read.samples);
  asking.begin(name, read.generates);
  draw(read);
  events = follow(name, read.from, {
    news: (read) => own === ticket && news(read),
    begin: () => own === ticket && show(name),
    lost: () => problem("The server does not answer: it has ended, or the connection is lost. The dashboard shows the last known state."),
    back: () => problem(null),
  });
  await look();
}

function news(read) {
  if (curves.news(read.lines)) return show(run);
  memory.news(read.lines);
  samples.news(read.lines);
  draw(read);
}

function draw(read) {
  now = read;
  problem(null);
  const messages = { running: "running", ended: "ended", stopped: "stopped; continue with hydra resume" };
  // The total of a search is not known in advance.
  const asked = read.search ? `; ${read.search.trained} of ${read.search.asked} minibatches requested so far` : "";
  $("state").textContent = `${messages[read.state]}${read.at_s ? `, ${seconds(read.at_s)}` : ""}${asked}`;
  $("report").hidden = !read.report;
  $("report").href = reportOf(run);
  curves.lengths(read.tasks);
  compare(read);
  memory.draw();
}

/** Draws the parts that depend on the filters and on the choice of colours. */
function compare(read) {
  settings.draw(run, read.tasks);
  curves.filter(read.tasks.filter((task) => !settings.isWanted(task)).map((task) => task.name));
  curves.draw();
  tasks.draw(run, read);
  parallel.draw(read.tasks);
  samples.draw(read.tasks);
  asking.draw(read.tasks);
}

async function look() {
  if (run && !document.hidden) devices.draw(await timeline(run));
}

/** Repeats an action every `every` milliseconds, also after a failure. */
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
[asking, curves, devices, memory].forEach((part) => part.listen());
[settings, tasks].forEach((part) => part.listen(recompare));
addEventListener("resize", recompare);
theme(localStorage.getItem("theme") ?? "system");
again(list, LIST);
again(() => (now && now.state === "running" ? look() : Promise.resolve()), DEVICES);
