"use strict";
// Values under the pointer, or under the arrow keys; runs shown and hidden. Charts need none of it.
(() => {
  const values = JSON.parse(document.getElementById("values").textContent);
  const axisNow = (axes) => Object.keys(axes).find((axis) => {
    const button = document.getElementById("by-" + axis);
    return !button || button.checked;
  });
  const units = [["T", 1e12], ["B", 1e9], ["M", 1e6]];
  const number = (value) => {
    const size = Math.abs(value);
    const unit = units.find(([, from]) => size >= from);
    if (unit) return (value / unit[1]).toPrecision(4) + unit[0];
    if (size && size < 1e-3) return value.toExponential(2);
    return value.toLocaleString("en-US", {maximumSignificantDigits: 5});
  };
  const clock = (seconds) => {
    if (seconds < 60) return seconds.toFixed(1) + " s";
    const minutes = Math.floor(seconds / 60);
    if (minutes < 60) return minutes + " min " + Math.round(seconds % 60) + " s";
    return Math.floor(minutes / 60) + " h " + (minutes % 60) + " min";
  };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle + 1; else high = middle;
    }
    return low && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
  };
  const made = (tag, name) => Object.assign(document.createElement(tag), {className: name || ""});

  const hidden = new Set();
  for (const figure of document.querySelectorAll("figure.chart")) {
    const chart = values[figure.id.slice("chart-".length)];
    if (!chart) continue;
    const area = figure.querySelector(".area");
    const rule = made("div", "rule hidden"), tip = made("div", "tip hidden");
    area.append(rule, tip);
    let at = 1;
    const show = (share) => {
      at = Math.min(1, Math.max(0, share));
      const axis = axisNow(chart.axes), [begin, end] = chart.ranges[axis];
      const x = begin + at * (end - begin);
      const curves = chart.curves.filter((curve) => !hidden.has(curve.label) && curve.y.length);
      if (!curves.length) return hide();
      const near = curves.map((curve) => curve.x[axis][nearest(curve.x[axis], x)]);
      const place = near.reduce((a, b) => Math.abs(b - x) < Math.abs(a - x) ? b : a);
      tip.replaceChildren(made("b"));
      tip.firstChild.textContent = chart.axes[axis] + " " + (axis === "hours" ? clock(place) : number(place));
      curves.forEach((curve, n) => {
        const row = made("div"), dot = made("i");
        dot.style.background = curve.colour;
        const y = number(curve.y[nearest(curve.x[axis], x)]);
        row.append(dot, (curve.label ? curve.label + " " : "") + y);
        tip.append(row);
      });
      const left = (place - begin) / (end - begin) * area.clientWidth;
      rule.style.left = left + "px";
      rule.style.height = area.querySelector("svg").clientHeight + "px";
      rule.classList.remove("hidden");
      tip.classList.remove("hidden");
      const room = area.clientWidth - tip.offsetWidth;
      tip.style.left = Math.max(0, Math.min(room, left + 12 > room ? left - tip.offsetWidth - 12 : left + 12)) + "px";
      tip.style.top = "8px";
    };
    const hide = () => { rule.classList.add("hidden"); tip.classList.add("hidden"); };
    area.addEventListener("pointermove", (event) => {
      const box = area.getBoundingClientRect();
      show((event.clientX - box.left) / box.width);
    });
    area.addEventListener("pointerleave", hide);
    figure.addEventListener("blur", hide);
    figure.addEventListener("keydown", (event) => {
      const by = {ArrowLeft: -0.01, ArrowRight: 0.01}[event.key];
      if (by) { show(at + by); event.preventDefault(); }
      if (event.key === "Escape") hide();
    });
  }

  for (const box of document.querySelectorAll("input[data-run]")) {
    const colour = box.dataset.colour, name = box.dataset.run;
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(name); else hidden.add(name);
      box.closest("tr").classList.toggle("off", !box.checked);
      for (const path of document.querySelectorAll("path[data-curve]"))
        if (path.dataset.curve === name) path.classList.toggle("hidden", !box.checked);
    });
  }
})();
