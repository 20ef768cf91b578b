// Memory by tier: reserved bytes against the budget, now and over time.

import { $, bytes, el, ink } from "/format.js";

const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"];
const MOST = 6000;

let tiers = [];
let now = [];
let points = [];
let plot = null;

export function begin(memory) {
  ({ tiers, now, points } = memory);
  plot?.destroy();
  plot = null;
}

export function news(lines) {
  for (const line of lines.filter((line) => line.event === "memory" && Array.isArray(line.tiers))) {
    if (!tiers.length) tiers = line.tiers.map(({ name, budget_bytes }) => ({ name, budget_bytes }));
    const of = (name) => line.tiers.find((tier) => tier.name === name);
    now = tiers.map(({ name }) => of(name)?.reserved_bytes ?? 0);
    points.push([line.at_s, tiers.map(({ name }) => of(name)?.peak_bytes ?? null)]);
  }
  if (points.length > MOST) points = points.filter((_, place) => place % 2 === 1);
}

export function draw() {
  $("tiers").replaceChildren(...tiers.map((tier, place) => {
    const share = now[place] / tier.budget_bytes;
    const meter = el("meter", { value: share, max: 1, title: `${(100 * share).toFixed(1)} %` });
    meter.setAttribute("aria-label", `${tier.name}: ${(100 * share).toFixed(0)} percent reserved`);
    const name = el("span", {}, swatch(place), tier.name);
    return el("div", { className: "tier" }, name, meter, `${bytes(now[place])} of ${bytes(tier.budget_bytes)}`);
  }));
  if (!points.length) return;
  const share = (place) => points.map(([, all]) => all[place] === null ? null : (100 * all[place]) / tiers[place].budget_bytes);
  const data = [points.map(([at]) => at), ...tiers.map((_, place) => share(place))];
  if (plot) return plot.setData(data);
  const axis = { stroke: ink("--soft"), grid: { stroke: ink("--line"), width: 1 }, ticks: { stroke: ink("--line"), width: 1 } };
  const line = (tier, place) => ({
    label: tier.name, stroke: COLOURS[place % COLOURS.length], width: 1.5, points: { show: false },
    value: (_, value) => (value === null ? "–" : `${value.toFixed(1)} %`),
  });
  const series = [{ label: "second" }, ...tiers.map(line)];
  const scales = { x: { time: false }, y: { range: (_, min, max) => [0, Math.max(max * 1.05, 1)] } };
  const axes = [{ ...axis }, { ...axis, values: (_, ticks) => ticks.map((tick) => `${tick} %`) }];
  plot = new uPlot({ width: $("memory").clientWidth, height: 200, series, scales, axes }, data, $("memory"));
}

function swatch(place) {
  const made = el("span", { className: "swatch" });
  made.style.background = COLOURS[place % COLOURS.length];
  return made;
}

export function repaint() {
  plot?.destroy();
  plot = null;
  draw();
}

export const listen = () => addEventListener("resize", () => plot?.setSize({ width: $("memory").clientWidth, height: 200 }));
