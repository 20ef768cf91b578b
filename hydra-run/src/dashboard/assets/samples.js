// The texts that tasks generated last: a row for each prompt, a column for each task.

import { $, colour, el } from "/format.js";
import { isWanted } from "/settings.js";

/** The last samples by task name: minibatches done, and the prompts with their texts. */
const samples = new Map();

export function begin(all) {
  samples.clear();
  for (const { task, step, samples: texts } of all ?? []) samples.set(task, { step, texts });
}

export function news(lines) {
  for (const { event, task, step, samples: texts } of lines) {
    if (event === "samples") samples.set(task, { step, texts });
  }
}

/** Draws the tasks in the order of the leaderboard. */
export function draw(tasks) {
  const shown = tasks.filter((task) => samples.has(task.name) && isWanted(task)).map(({ name }) => [name, samples.get(name)]);
  $("samples-section").hidden = !shown.length;
  if (!shown.length) return;
  const head = ([name, { step }]) => el("th", { className: "text" },
    el("span", { className: "swatch", style: `background: ${colour(name)}` }), `${name}, after ${step}`);
  const prompts = Math.max(...shown.map(([, { texts }]) => texts.length));
  const row = (place) => {
    const prompt = shown.map(([, { texts }]) => texts[place]?.prompt).find((text) => text !== undefined) ?? "";
    const cells = shown.map(([, { texts }]) => el("td", { className: "sample" }, texts[place]?.text ?? ""));
    return el("tr", {}, el("td", { className: "sample prompt" }, prompt), ...cells);
  };
  const rows = Array.from({ length: prompts }, (_, place) => row(place));
  $("samples").replaceChildren(el("thead", {}, el("tr", {}, el("th", { className: "text" }, "prompt"), ...shown.map(head))), el("tbody", {}, ...rows));
}
