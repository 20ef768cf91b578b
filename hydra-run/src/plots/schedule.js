"use strict";
(() => {
  // data: names of devices and tasks, colours of each task (forward, backward, evaluation), seconds, columns, and for each
  // device its rectangles as [from column, to column, task, shade, ...].
  const canvas = document.getElementById("schedule"), label = document.getElementById("schedule-label");
  const LEFT = 90, TOP = 8, ROW = 40, GAP = 10, AXIS = 26, kinds = ["forward", "backward", "evaluation"];
  let from = 0, to = data.columns, dragged = null;
  const ink = (colour) => {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#000" : "#fff";
  };
  const seconds = (column) => column * data.seconds / data.columns;
  const width = () => canvas.clientWidth - LEFT - 8;
  const column = (x) => from + (x - LEFT) / width() * (to - from);
  function draw() {
    const scale = window.devicePixelRatio || 1, height = TOP + data.rows.length * (ROW + GAP) + AXIS;
    canvas.style.height = height + "px";
    canvas.width = canvas.clientWidth * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "12px sans-serif";
    const place = (at) => LEFT + (at - from) / (to - from) * width();
    data.rows.forEach((row, device) => {
      const y = TOP + device * (ROW + GAP);
      pen.fillStyle = "#f0f0f0";
      pen.fillRect(LEFT, y, width(), ROW);
      pen.fillStyle = "#222";
      pen.fillText(data.devices[device], 4, y + ROW / 2 + 4);
      for (let i = 0; i < row.length; i += 4) {
        if (row[i + 1] <= from || row[i] >= to) continue;
        const left = Math.max(place(row[i]), LEFT), right = Math.min(place(row[i + 1]), LEFT + width());
        const colour = data.colours[row[i + 2]][row[i + 3]], name = data.tasks[row[i + 2]];
        pen.fillStyle = colour;
        pen.fillRect(left, y, Math.max(right - left, 0.5), ROW);
        // Names distinguish neighbours whose colours repeat.
        if (right - left > 30 && pen.measureText(name).width + 10 < right - left) {
          pen.fillStyle = ink(colour);
          pen.fillText(name, left + 5, y + ROW / 2 + 4);
          pen.fillStyle = "#fff";
          pen.fillRect(left, y, 1, ROW);
        }
      }
    });
    const raw = seconds(to - from) / 8, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999) || 10 * power;
    const y = TOP + data.rows.length * (ROW + GAP);
    pen.fillStyle = "#222";
    for (let at = Math.ceil(seconds(from) / step) * step; at <= seconds(to); at += step) {
      const x = place(at / data.seconds * data.columns);
      pen.fillRect(x, y, 1, 5);
      pen.fillText(+at.toPrecision(6) + " s", x - 8, y + 18);
    }
  }
  function show(start, length) {
    length = Math.min(Math.max(length, 20), data.columns);
    from = Math.min(Math.max(start, 0), data.columns - length);
    to = from + length;
    draw();
  }
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const at = column(event.offsetX), times = event.deltaY < 0 ? 0.8 : 1.25;
    show(at - (at - from) * times, (to - from) * times);
  }, { passive: false });
  canvas.addEventListener("mousedown", (event) => { dragged = [event.offsetX, from]; });
  window.addEventListener("mouseup", () => { dragged = null; });
  canvas.addEventListener("dblclick", () => show(0, data.columns));
  canvas.addEventListener("mousemove", (event) => {
    if (dragged) {
      show(dragged[1] - (event.offsetX - dragged[0]) / width() * (to - from), to - from);
      return;
    }
    const at = column(event.offsetX), row = data.rows[Math.floor((event.offsetY - TOP) / (ROW + GAP))] || [];
    label.textContent = "";
    for (let i = 0; i < row.length; i += 4) {
      if (row[i] <= at && at < row[i + 1]) {
        label.textContent = data.tasks[row[i + 2]] + ", " + kinds[row[i + 3]] + ", " + seconds(row[i]).toFixed(3) +
          " s to " + seconds(row[i + 1]).toFixed(3) + " s";
      }
    }
  });
  window.addEventListener("resize", draw);
  draw();
})();
