// Drawing: contours, landmarks and paths on one canvas.

const COLOR = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const byId = (id) => document.getElementById(id);
const REGION = DATA.region; // [mu min, mu max, sigma min, sigma max]
const LABELS = { sharp: "sharp minimum", flat: "flat minimum", saddle: "saddle" };

let field = null; // the cached background

function frame() {
  const canvas = byId("map"), ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    field = null;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  const x = (mu) => ((mu - REGION[0]) / (REGION[1] - REGION[0])) * width;
  const y = (sigma) => height - ((sigma - REGION[2]) / (REGION[3] - REGION[2])) * height;
  return { pen, width, height, ratio, x, y };
}

function background(view) {
  const theme = document.documentElement.dataset.theme;
  if (field && field.theme === theme) return field.image;
  const image = document.createElement("canvas");
  image.width = view.width * view.ratio;
  image.height = view.height * view.ratio;
  const pen = image.getContext("2d");
  pen.scale(view.ratio, view.ratio);
  const columns = Math.ceil(view.width / 3), rows = Math.ceil(view.height / 3);
  const grid = Array.from({ length: rows + 1 }, (_, j) => Array.from({ length: columns + 1 }, (_, i) =>
    loss([REGION[0] + (i / columns) * (REGION[1] - REGION[0]), REGION[3] - (j / rows) * (REGION[3] - REGION[2])])));
  const low = COLOR("--low").split(" ").map(Number), high = COLOR("--high").split(" ").map(Number);
  const cell = { w: view.width / columns, h: view.height / rows };
  for (let j = 0; j < rows; j++) for (let i = 0; i < columns; i++) {
    const t = Math.min(1, Math.max(0, (grid[j][i] - 0.27) / 0.75)) ** 0.6;
    pen.fillStyle = `rgb(${low.map((c, n) => Math.round(c + t * (high[n] - c))).join(" ")})`;
    pen.fillRect(i * cell.w, j * cell.h, cell.w + 1, cell.h + 1);
  }
  pen.strokeStyle = COLOR("--contour");
  for (const level of DATA.levels) contour(pen, grid, level, cell);
  field = { theme, image };
  return image;
}

// Marching squares: in each cell join the points where the level crosses its edges.
function contour(pen, grid, level, cell) {
  pen.beginPath();
  for (let j = 0; j + 1 < grid.length; j++) for (let i = 0; i + 1 < grid[j].length; i++) {
    const corners = [[i, j], [i + 1, j], [i + 1, j + 1], [i, j + 1]];
    const crossings = [];
    corners.forEach(([ai, aj], n) => {
      const [bi, bj] = corners[(n + 1) % 4];
      const a = grid[aj][ai] - level, b = grid[bj][bi] - level;
      if (a < 0 === b < 0) return;
      const t = a / (a - b);
      crossings.push([(ai + t * (bi - ai)) * cell.w, (aj + t * (bj - aj)) * cell.h]);
    });
    for (let n = 0; n + 1 < crossings.length; n += 2) {
      pen.moveTo(...crossings[n]);
      pen.lineTo(...crossings[n + 1]);
    }
  }
  pen.stroke();
}

function path(view, points, color, wide) {
  const { pen, x, y } = view;
  const inside = points.filter((p) => p.every(Number.isFinite));
  pen.lineJoin = "round";
  for (const [stroke, width] of wide ? [[COLOR("--halo"), 5], [color, 2.2]] : [[color, 1.2]]) {
    pen.strokeStyle = stroke;
    pen.lineWidth = width;
    pen.beginPath();
    inside.forEach((p, i) => (i ? pen.lineTo(x(p[0]), y(p[1])) : pen.moveTo(x(p[0]), y(p[1]))));
    pen.stroke();
  }
  if (!wide || !inside.length) return;
  pen.fillStyle = color;
  for (const p of inside.slice(1, -1)) disc(view, p, 1.9, color);
  disc(view, inside.at(-1), 6.5, COLOR("--halo"));
  disc(view, inside.at(-1), 5, color);
}

function disc(view, point, radius, color) {
  view.pen.fillStyle = color;
  view.pen.beginPath();
  view.pen.arc(view.x(point[0]), view.y(point[1]), radius, 0, 2 * Math.PI);
  view.pen.fill();
}

const narrow = (view) => view.width < 480;

// Text at a point of the plane, offset by (dx, dy) pixels.
function label(view, text, point, dx, dy, align = "center", weight = 400) {
  write(view, text, view.x(point[0]) + dx, view.y(point[1]) + dy, align, weight);
}

function write(view, text, x, y, align, weight) {
  const { pen } = view;
  pen.font = `${weight} ${narrow(view) ? 12 : 13.5}px system-ui, sans-serif`;
  pen.textAlign = align;
  pen.lineWidth = 4;
  pen.strokeStyle = COLOR("--halo");
  pen.strokeText(text, x, y);
  pen.fillStyle = COLOR("--ink");
  pen.fillText(text, x, y);
}

function landmarks(view) {
  const { pen, x, y } = view;
  for (const place of DATA.places) {
    const [px, py] = [x(place.point[0]), y(place.point[1])];
    pen.strokeStyle = COLOR("--ink");
    pen.lineWidth = 1.8;
    pen.beginPath();
    const arms = place.name === "saddle" ? [[1, 1], [1, -1]] : [[1, 0], [0, 1]];
    for (const [ax, ay] of arms) {
      pen.moveTo(px - 6 * ax, py - 6 * ay);
      pen.lineTo(px + 6 * ax, py + 6 * ay);
    }
    pen.stroke();
  }
  pen.strokeStyle = COLOR("--ink");
  pen.lineWidth = 2;
  pen.beginPath();
  pen.arc(x(setting.start[0]), y(setting.start[1]), 5, 0, 2 * Math.PI);
  pen.fillStyle = COLOR("--card");
  pen.fill();
  pen.stroke();
}

function labels(view) {
  for (const place of DATA.places) {
    const name = narrow(view) ? place.name : LABELS[place.name];
    const text = `${name} ${place.loss.toFixed(3)}`;
    if (place.name === "saddle") label(view, text, place.point, 11, 5, "left");
    else label(view, text, place.point, 0, place.name === "sharp" ? 32 : -18);
  }
  label(view, "start", setting.start, 10, 12, "left");
  if (narrow(view)) { // the map stays visible on a phone while the numbers scroll away
    write(view, byId("verdict").textContent, 8, 17, "left", 600);
    if (byId("end").textContent.startsWith("(")) write(view, byId("end").textContent, 8, 34, "left", 600);
  }
}

function draw() {
  const view = frame();
  if (!view.width || !shown) return;
  view.pen.drawImage(background(view), 0, 0, view.width, view.height);
  if (byId("compare").checked) {
    for (const rule of Object.keys(DATA.rules)) {
      if (rule !== setting.rule) path(view, trace({ ...setting, rule }), COLOR("--" + rule), false);
    }
  }
  landmarks(view);
  path(view, shown.points.slice(0, shown.upTo), COLOR("--" + setting.rule), true);
  labels(view);
}
