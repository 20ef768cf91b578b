// The timeline of the devices' last seconds: a row for each track, a box for each span.

import { $, colour, el, ink } from "/format.js";

const ROW = { compute: 26, other: 12 };
const LABEL = 120;
const SHADE = { evaluate: 0.35, forward: 0.65, backward: 1 };

let canvas = null;
let last = { tracks: [], spans: [] };

export function draw(read = last) {
  last = read;
  canvas ??= $("devices").appendChild(el("canvas", { className: "timeline" }));
  canvas.setAttribute("role", "img");
  const tracks = read.tracks.map(([id, name]) => ({ id, name, height: name.endsWith("compute") ? ROW.compute : ROW.other }));
  let y = 4;
  for (const track of tracks) {
    track.y = y;
    y += track.height + 5;
  }
  const [width, height] = [$("devices").clientWidth, y + 18];
  const dpr = devicePixelRatio;
  [canvas.width, canvas.height] = [width * dpr, height * dpr];
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(dpr, dpr);
  const end = Math.max(0, ...read.spans.map((span) => span[2]));
  const first = Math.min(end, ...read.spans.map((span) => span[1]));
  const long = Math.max(Math.min(Number($("window").value), end - first), 0.001);
  const left = Math.min(LABEL, width * 0.3);
  const at = (s) => left + ((s - (end - long)) / long) * (width - left - 4);
  labels(ctx, tracks, left, width);
  const rows = new Map(tracks.map((track) => [track.id, track]));
  for (const [id, from, to, task, work] of read.spans) {
    const row = rows.get(id);
    if (!row || to < end - long) continue;
    const [a, b] = [Math.max(left, at(from)), at(to)];
    ctx.globalAlpha = SHADE[work] ?? 0.8;
    ctx.fillStyle = colour(task);
    ctx.fillRect(a, row.y, Math.max(b - a, 0.6), row.height);
  }
  ctx.globalAlpha = 1;
  axis(ctx, { left, width, y, end, long });
  const busy = tracks.filter((track) => track.name.endsWith("compute")).map((track) => {
    const inside = read.spans.filter(([id, , to]) => id === track.id && to > end - long);
    const s = inside.reduce((sum, [, from, to]) => sum + to - Math.max(from, end - long), 0);
    return `${track.name} ${((100 * s) / long).toFixed(0)} % busy`;
  });
  canvas.setAttribute("aria-label", busy.length ? `the last ${long.toFixed(1)} seconds: ${busy.join(", ")}` : "no device has computed yet");
  canvas.title = busy.join(", ");
}

function labels(ctx, tracks, left, width) {
  ctx.font = "12px system-ui, sans-serif";
  ctx.textBaseline = "middle";
  for (const track of tracks) {
    ctx.fillStyle = ink("--line");
    ctx.globalAlpha = 0.5;
    ctx.fillRect(left, track.y, width - left - 4, track.height);
    ctx.globalAlpha = 1;
    ctx.fillStyle = ink("--soft");
    ctx.fillText(track.name, 0, track.y + track.height / 2, left - 8);
  }
}

function axis(ctx, { left, width, y, end, long }) {
  ctx.fillStyle = ink("--soft");
  ctx.textAlign = "left";
  ctx.fillText(`${(end - long).toFixed(1)} s`, left, y + 8);
  ctx.textAlign = "right";
  ctx.fillText(`${end.toFixed(1)} s`, width - 4, y + 8);
  ctx.textAlign = "left";
}

export function listen() {
  $("window").addEventListener("input", () => draw());
  addEventListener("resize", () => draw());
}
