"use strict";
// The toy example in double precision: the loss, perturbation and update of the Python library.
// wsam.toy.page writes DATA (components, stationary points, defaults) into the page.

const EPS = 1e-12; // as in the library: avoids division by zero
const START_SHIFT = 1e-12, LAST_STEPS = 10, MAX_DECIMALS = 4, MAX_LOSS_DECIMALS = 5, MAX_DIGITS = 3;

// Each component's share of the likelihood: weight * exp(-KL / width^2). NaN where sigma <= 0.
function shares(w) {
  return DATA.components.map((component) => {
    const distance = (w[1] ** 2 + (w[0] - component.mean) ** 2) / (2 * component.deviation ** 2);
    const divergence = Math.log(component.deviation / w[1]) + distance - 0.5;
    return component.weight * Math.exp(-divergence / component.width ** 2);
  });
}

function loss(w) {
  return -Math.log(shares(w).reduce((sum, share) => sum + share, 0));
}

function gradient(w) {
  const parts = shares(w);
  const total = parts.reduce((sum, share) => sum + share, 0);
  const g = [0, 0];
  DATA.components.forEach((component, i) => {
    const share = parts[i] / total / component.width ** 2;
    g[0] += (share * (w[0] - component.mean)) / component.deviation ** 2;
    g[1] += share * (w[1] / component.deviation ** 2 - 1 / w[1]);
  });
  return g;
}

// Central differences of the exact gradient: eigenvalues to about nine digits.
function hessianEigenvalues(w) {
  const step = 1e-4;
  const along = (i) => {
    const ahead = w.slice(), behind = w.slice();
    ahead[i] += step;
    behind[i] -= step;
    const a = gradient(ahead), b = gradient(behind);
    return [(a[0] - b[0]) / (2 * step), (a[1] - b[1]) / (2 * step)];
  };
  const [xx, xy] = along(0), [yx, yy] = along(1);
  const middle = (xx + yy) / 2, off = (xy + yx) / 2;
  const radius = Math.hypot((xx - yy) / 2, off);
  return [middle - radius, middle + radius];
}

// sqrt(S) of the metric S: 1, |w| + eta, or 1/sqrt(1 + eta g0^2).
function metricRoot(geometry, w, g0) {
  if (geometry === "adaptive") return w.map((x) => Math.abs(x) + DATA.adaptiveEta);
  if (geometry === "fisher") return g0.map((x) => 1 / Math.sqrt(x * x * DATA.fisherEta + 1));
  return [1, 1];
}

// d = rho * S g0 / (sqrt(<g0, S g0>) + eps)
function perturbation(geometry, rho, w, g0) {
  const root = metricRoot(geometry, w, g0);
  const z = [root[0] * g0[0], root[1] * g0[1]];
  const scale = rho / (Math.sqrt(z[0] * z[0] + z[1] * z[1]) + EPS);
  return [scale * root[0] * z[0], scale * root[1] * z[1]];
}

// Coefficients [loss, sharp] of the gradient passed to the base: loss * g0 + sharp * (g1 - g0).
function baseWeights(setting, g0, g1) {
  const k = setting.gamma / (1 - setting.gamma);
  switch (setting.rule) {
    case "sam": return [1, 1];
    case "coupled_wsam": return [1, k];
    case "gsam": {
      const square = g1[0] * g1[0] + g1[1] * g1[1];
      const ratio = square > 0 ? (g0[0] * g1[0] + g0[1] * g1[1]) / square : 0;
      return [1 + setting.alpha * (ratio - 1), 1 + setting.alpha * ratio];
    }
    default: return [1, 0]; // SGD, and WSAM: its sharpness term is decoupled
  }
}

function trace(setting, start = setting.start) {
  const k = setting.gamma / (1 - setting.gamma);
  let w = start.slice(), velocity = null;
  const points = [w];
  for (let step = 0; step < setting.steps; step++) {
    const g0 = gradient(w);
    const d = perturbation(setting.geometry, setting.rho, w, g0);
    const g1 = setting.rule === "sgd" ? g0 : gradient([w[0] + d[0], w[1] + d[1]]);
    const [plain, sharp] = baseWeights(setting, g0, g1);
    const decoupled = setting.rule === "wsam" ? k : 0;
    const diff = [g1[0] - g0[0], g1[1] - g0[1]];
    const baseGrad = [0, 1].map((i) => plain * g0[i] + (sharp === 0 ? 0 : sharp * diff[i]));
    velocity = velocity === null ? baseGrad : [0, 1].map((i) => setting.momentum * velocity[i] + baseGrad[i]);
    w = [0, 1].map((i) => {
      const stepped = w[i] - setting.lr * velocity[i];
      return decoupled === 0 ? stepped : stepped - setting.lr * decoupled * diff[i];
    });
    points.push(w);
  }
  return points;
}

// How much the last points, their loss and their eigenvalues change if the start moves by 1e-12:
// the possible effect of rounding. NaN if any of them is NaN, because Math.max is.
function spreads(setting, points) {
  const shifted = trace(setting, setting.start.map((x) => x + START_SHIFT)).slice(-LAST_STEPS);
  const pairs = points.slice(-LAST_STEPS).map((p, i) => [p, shifted[i]]);
  const largest = (gap) => Math.max(...pairs.map(([a, b]) => gap(a, b)));
  const eigenvalue = (i) => (a, b) => Math.abs(hessianEigenvalues(a)[i] - hessianEigenvalues(b)[i]);
  return {
    end: largest((a, b) => Math.hypot(a[0] - b[0], a[1] - b[1])),
    loss: largest((a, b) => Math.abs(loss(a) - loss(b))),
    eigenvalues: [largest(eigenvalue(0)), largest(eigenvalue(1))],
  };
}

function stableDecimals(spread, most = MAX_DECIMALS) {
  if (!Number.isFinite(spread)) return 0;
  if (spread <= 0.5 * 10 ** -most) return most;
  return Math.max(0, Math.floor(-Math.log10(2 * spread)));
}

// The number of leading digits of a value that a spread does not change.
function stableDigits(value, spread) {
  if (spread === 0 || value === 0) return MAX_DIGITS;
  if (!Number.isFinite(spread) || !Number.isFinite(value)) return 0;
  const leading = Math.floor(Math.log10(Math.abs(value))), unit = Math.ceil(Math.log10(2 * spread));
  return Math.max(0, Math.min(MAX_DIGITS, leading - unit + 1));
}

function thousandths(value, spread) {
  const digits = stableDigits(value, spread);
  const text = (1000 * value).toPrecision(Math.max(1, digits));
  return digits || !Number.isFinite(spread) ? text : text + " ± " + Number((1000 * spread).toPrecision(1));
}

function chaotic(spread) {
  return stableDecimals(spread) < 2;
}

function leftDomain(end) {
  return !(end[1] > 0);  // also if it is NaN
}

function endText(end, spread) {
  if (leftDomain(end)) return "left the domain";
  const note = chaotic(spread) ? " ± " + Number(spread.toPrecision(1)) : "";
  return "(" + end.map((x) => x.toFixed(stableDecimals(spread))).join(", ") + ")" + note;
}

function minimumNear(point) {
  const near = DATA.places.find((place) => place.name !== "saddle" &&
    Math.hypot(place.point[0] - point[0], place.point[1] - point[1]) <= DATA.basinRadius);
  return near ? near.name : null;
}
