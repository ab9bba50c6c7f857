"use strict";
// Values under the pointer, or under the arrow keys; runs shown and hidden. Charts need none of it.
(() => {
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
  const nearest = (xs, x) =>
    xs.reduce((best, value, at) => Math.abs(value - x) < Math.abs(xs[best] - x) ? at : best, 0);
  const made = (tag, name) => Object.assign(document.createElement(tag), {className: name});
  const hidden = new Set(), places = new WeakMap();
  let shown = null;

  const hide = () => {
    shown?.querySelectorAll(".rule, .tip").forEach((element) => element.remove());
    shown = null;
  };
  const show = (figure, share) => {
    hide();
    const chart = JSON.parse(figure.dataset.values), at = Math.min(1, Math.max(0, share));
    const area = figure.querySelector(".area"), axis = axisNow(chart.axes);
    const [begin, end] = chart.ranges[axis];
    const to = (x) => chart.log ? Math.log(x / begin) / Math.log(end / begin) : (x - begin) / (end - begin);
    const x = chart.log ? begin * (end / begin) ** at : begin + at * (end - begin);
    const curves = chart.curves.filter((curve) => !hidden.has(curve.run) && curve.y.length);
    places.set(figure, at);
    if (!curves.length) return;
    const near = curves.map((curve) => curve.x[axis][nearest(curve.x[axis], x)]);
    const place = near[nearest(near, x)];
    const tip = made("div", "tip"), rule = made("div", "rule"), head = made("b", "");
    const text = axis === "hours" ? clock(place) : number(place);
    head.textContent = chart.names ? chart.names[Math.floor(place)] : chart.axes[axis] + " " + text;
    tip.append(head);
    for (const curve of curves) {
      const row = made("div", ""), dot = made("i", "");
      dot.style.background = curve.colour;
      row.append(dot, (curve.label ? curve.label + " " : "") + number(curve.y[nearest(curve.x[axis], x)]));
      tip.append(row);
    }
    area.append(rule, tip);
    shown = figure;
    const left = to(place) * area.clientWidth, room = area.clientWidth - tip.offsetWidth;
    rule.style.left = left + "px";
    tip.style.left = Math.max(0, Math.min(room, left + 12 > room ? left - tip.offsetWidth - 12 : left + 12)) + "px";
    tip.style.top = "8px";
  };
  document.addEventListener("pointermove", (event) => {
    const area = event.target.closest?.(".chart[data-values] .area");
    if (!area) return hide();
    const box = area.getBoundingClientRect();
    show(area.closest(".chart"), (event.clientX - box.left) / box.width);
  });
  document.addEventListener("pointerleave", hide);
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => {
    if (!event.target.matches?.(".chart[data-values]")) return;
    const by = {ArrowLeft: -0.01, ArrowRight: 0.01}[event.key];
    if (by) { show(event.target, (places.get(event.target) ?? 1) + by); event.preventDefault(); }
    if (event.key === "Escape") hide();
  });
  document.addEventListener("change", ({target: box}) => {
    const run = box.dataset?.run;
    if (run === undefined) return;
    if (box.checked) hidden.delete(run); else hidden.add(run);
    box.closest("tr").classList.toggle("off", !box.checked);
    for (const path of document.querySelectorAll("path[data-run]"))
      if (path.dataset.run === run) path.classList.toggle("hidden", !box.checked);
  });
})();
