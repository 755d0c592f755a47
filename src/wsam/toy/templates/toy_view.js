// Numbers and controls. The state of the page is one setting; every change recomputes and redraws.

const SLIDERS = [
  { name: "gamma", label: "γ, weight of sharpness", min: 0, max: 0.98, step: 0.01 },
  { name: "rho", label: "ρ, radius", min: 0.05, max: 6, step: 0.05 },
  { name: "lr", label: "learning rate", min: 0.1, max: 12, step: 0.1 },
  { name: "momentum", label: "momentum", min: 0, max: 0.98, step: 0.01 },
  { name: "alpha", label: "α, of GSAM", min: 0, max: 2, step: 0.05 },
  { name: "steps", label: "steps", min: 1, max: 400, step: 1 },
];
const PRESETS = {
  paper06: { ...DATA.defaults, rule: "wsam", gamma: 0.6 },
  paper95: { ...DATA.defaults, rule: "wsam", gamma: 0.95 },
  coupled95: { ...DATA.defaults, rule: "coupled_wsam", gamma: 0.95 },
};

let setting = { ...PRESETS.paper95 };
let shown = null; // { points, upTo: the number of points drawn }

function inUse(name) {
  if (name === "gamma") return setting.rule === "wsam" || setting.rule === "coupled_wsam";
  if (name === "alpha") return setting.rule === "gsam";
  return name !== "rho" || setting.rule !== "sgd";
}

// ---- numbers ----

function weightText() {
  const k = setting.gamma / (1 - setting.gamma);
  const show = (x) => String(Number(x.toPrecision(3)));
  // Momentum multiplies the base's gradient by 1/(1-m); the decoupled term is applied once.
  if (setting.rule === "wsam") return `${show(k * (1 - setting.momentum))} (k = ${show(k)})`;
  if (setting.rule === "coupled_wsam") return show(k);
  return setting.rule === "sgd" ? "0" : "1";
}

function noteText(end, spread) {
  if (leftDomain(end)) {
    const hint = setting.geometry === "adaptive"
      ? " Adaptive radii are relative to the size of the weights: try ρ between 0.05 and 0.3." : "";
    return "The run reached σ ≤ 0, at the weights or at the perturbed weights, where the loss is undefined. " +
      "Reduce the learning rate, ρ or γ." + hint;
  }
  if (chaotic(spread)) {
    return "The run oscillates chaotically around its end: moving the start by 1e-12 moves the end by about " +
      `${Number(spread.toPrecision(1))}. Only the digits shown can be reproduced.`;
  }
  return "";
}

function update() {
  const points = trace(setting), end = points.at(-1), spread = spreads(setting, points);
  shown = { points, upTo: points.length };
  const where = minimumNear(end), lost = leftDomain(end);
  const name = DATA.rules[setting.rule];
  byId("verdict").textContent = lost ? `${name} left the domain`
    : where ? `${name} ends at the ${where} minimum` : `${name} is at neither minimum`;
  byId("swatch").style.background = `var(--${setting.rule})`;
  byId("end").textContent = endText(end, spread.end);
  byId("loss").textContent = lost ? "–"
    : loss(end).toFixed(stableDecimals(spread.loss, MAX_LOSS_DECIMALS));
  byId("eigenvalues").textContent = lost ? "–"
    : hessianEigenvalues(end).map((x, i) => thousandths(x, spread.eigenvalues[i])).join(", ");
  byId("weight").textContent = weightText();
  byId("note").textContent = noteText(end, spread.end);
  for (const { name } of SLIDERS) {
    byId(name).value = setting[name];
    byId(name + "-value").textContent = setting[name];
    byId(name).closest(".slider").classList.toggle("idle", !inUse(name));
  }
  for (const key of ["rule", "geometry"]) {
    document.querySelector(`input[name=${key}][value=${setting[key]}]`).checked = true;
  }
  draw();
}

function replay() {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return draw();
  const run = shown, begun = performance.now();
  const tick = (now) => {
    if (run !== shown) return; // the setting has changed
    run.upTo = Math.min(run.points.length, 1 + Math.floor(((now - begun) / 2500) * run.points.length));
    draw();
    if (run.upTo < run.points.length) requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
}

// ---- controls ----

function choices(field, key, names) {
  for (const [value, text] of Object.entries(names)) {
    const box = document.createElement("label"), input = document.createElement("input");
    const chip = document.createElement("span");
    Object.assign(input, { type: "radio", name: key, value });
    chip.textContent = text;
    if (key === "rule") box.style.setProperty("--chip", `var(--${value})`);
    input.addEventListener("change", () => change({ [key]: value }));
    box.append(input, chip);
    byId(field).append(box);
  }
}

function slider({ name, label, min, max, step }) {
  const box = document.createElement("div"), text = document.createElement("label");
  const value = document.createElement("output"), input = document.createElement("input");
  box.className = "slider";
  text.htmlFor = name;
  text.append(label, value);
  value.id = name + "-value";
  Object.assign(input, { type: "range", id: name, min, max, step });
  input.addEventListener("input", () => change({ [name]: Number(input.value) }));
  box.append(text, input);
  byId("sliders").append(box);
}

function change(values) {
  setting = { ...setting, ...values };
  update();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  draw();
}

choices("rules", "rule", DATA.rules);
choices("geometries", "geometry", { euclidean: "Euclidean", adaptive: "adaptive", fisher: "Fisher" });
SLIDERS.forEach(slider);
for (const button of document.querySelectorAll("[data-preset]")) {
  button.addEventListener("click", () => change(PRESETS[button.dataset.preset]));
}
byId("play").addEventListener("click", replay);
byId("compare").addEventListener("change", draw);
byId("theme").addEventListener("click", () =>
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
byId("map").addEventListener("click", (event) => {
  const box = byId("map").getBoundingClientRect();
  const mu = REGION[0] + ((event.clientX - box.left) / box.width) * (REGION[1] - REGION[0]);
  const sigma = REGION[3] - ((event.clientY - box.top) / box.height) * (REGION[3] - REGION[2]);
  change({ start: [Number(mu.toFixed(1)), Number(sigma.toFixed(1))] });
});
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
new ResizeObserver(draw).observe(byId("map"));
setTheme(dark.matches ? "dark" : "light");
update();
