// Curves of the last samples, as SVG.

import { el, setText, svg } from "../lib/dom.js";

const WIDTH = 320;
const HEIGHT = 84;
const MAX_POINTS = 320;

export class Chart {
  // `curves` are [name, sample => number or null].
  constructor(title, curves, format) {
    this.curves = curves;
    this.format = format;
    this.paths = curves.map((_, index) => svg("path", { class: `curve curve-${index}` }));
    this.top = el("span", { class: "meta" });
    this.now = curves.map(() => el("b"));
    const names = curves.map(([name], index) =>
      el("span", { class: `curve-name name-${index}` }, `${name} `, this.now[index]),
    );
    const viewBox = `0 0 ${WIDTH} ${HEIGHT}`;
    const attributes = { viewBox, preserveAspectRatio: "none", role: "img", "aria-label": title };
    this.picture = svg("svg", attributes, ...this.paths);
    const head = el("figcaption", {}, el("h3", {}, title), el("p", {}, ...names));
    this.element = el("figure", { class: "chart" }, head, this.picture, this.top);
  }

  draw(samples, fromS, toS) {
    const shown = thinned(samples.filter(({ at }) => at >= fromS), MAX_POINTS);
    const highest = niceTop(Math.max(0, ...this.curves.flatMap(([, read]) => shown.map(read))));
    this.curves.forEach(([, read], index) => {
      const points = shown.map((one) => [(one.at - fromS) / (toS - fromS), read(one)]);
      this.paths[index].setAttribute("d", pathOf(points, highest));
      setText(this.now[index], this.format(samples.length ? read(samples.at(-1)) : null));
    });
    setText(this.top, `up to ${this.format(highest)}`);
  }
}

// Returns a path of the points (share of the width, value); null interrupts it. A point between two
// gaps is a dot.
export function pathOf(points, highest) {
  let isDrawing = false;
  return points
    .map(([x, value]) => {
      const [command, dot] = isDrawing ? ["L", ""] : ["M", "h0"];
      isDrawing = value !== null && value !== undefined;
      if (!isDrawing) return "";
      const y = HEIGHT - 1 - (value / highest) * (HEIGHT - 3);
      return `${command}${(x * WIDTH).toFixed(1)} ${y.toFixed(1)}${dot}`;
    })
    .join("");
}

// The smallest of 1, 2, 5, 10, ... times a power of ten that is not below the value.
export function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= value * 0.999999);
}

// Keeps at most `limit` samples, the newest included.
export function thinned(samples, limit) {
  const step = Math.ceil(samples.length / limit);
  return samples.filter((_, index) => (samples.length - 1 - index) % step === 0);
}
