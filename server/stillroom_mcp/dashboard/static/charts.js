"use strict";
// Draws the metrics of one run, or of two runs in the same chart, and updates the charts as they grow.
const stillroomCharts = (() => {
  const COLOURS = ["--blue", "--orange"];
  const MIN_STEPS_FOR_TREND = 120;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function shown(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1000 && size < 1e9) return Math.round(value).toLocaleString("en").replaceAll(",", " ");
    return String(Number(value.toPrecision(3)));
  }

  // Neighbouring ticks differ, however little of their values that is.
  function tickLabels(ticks, step) {
    const digits = Math.min(20, Math.max(0, Math.ceil(-Math.log10(step))) + 1);
    return ticks.map((value) => (Math.abs(value) >= 1000 ? shown(value) : String(Number(value.toFixed(digits)))));
  }

  // A metric that is always 0 would have an axis up to 100.
  function valueRange(_, min, max) {
    if (min === null) return [null, null];
    return min === 0 && max === 0 ? [0, 1] : uPlot.rangeNum(min, max, 0.1, true);
  }

  // A moving average over 4 % of the steps, which shows the trend of noisy values.
  function trend(values) {
    const half = Math.max(1, Math.floor(values.length / 50));
    const sums = [0], nums = [0];
    values.forEach((value, i) => {
      sums.push(sums[i] + (value ?? 0));
      nums.push(nums[i] + (value === null ? 0 : 1));
    });
    return values.map((_, i) => {
      const from = Math.max(0, i - half), to = Math.min(values.length, i + half + 1);
      const num = nums[to] - nums[from];
      return num ? (sums[to] - sums[from]) / num : null;
    });
  }

  class RecordedMetrics {
    constructor() {
      this.steps = [];
      this.values = {};
      this.next = 0;
    }
    add(part) {
      const before = this.steps.length;
      this.steps.push(...part.steps);
      for (const name of Object.keys(part.values)) this.values[name] ??= Array(before).fill(null);
      for (const [name, column] of Object.entries(this.values)) {
        const added = part.values[name] ?? Array(part.steps.length).fill(null);
        for (const value of added) column.push(value);
      }
      this.next = part.next;
    }
    // A resumed run may record a step again: the last value counts.
    column(name) {
      const column = this.values[name];
      if (!column) return null;
      const byStep = new Map();
      this.steps.forEach((step, i) => column[i] !== null && byStep.set(step, column[i]));
      if (!byStep.size) return null;
      const steps = [...byStep.keys()].sort((a, b) => a - b);
      return [steps, steps.map((step) => byStep.get(step))];
    }
  }

  function seriesOf(figure, runs) {
    const tables = [], series = [];
    runs.forEach((run, index) => {
      const ink = colour(COLOURS[index]);
      const main = run.column(figure.dataset.metric);
      const name = runs.length > 1 ? (index ? "second" : "first") : figure.querySelector(".chart-title").textContent;
      if (main) {
        const isLong = main[0].length > MIN_STEPS_FOR_TREND;
        tables.push(main);
        series.push({ label: name, stroke: ink, width: isLong ? 1 : 2, alpha: isLong ? 0.35 : 1, points: { show: main[0].length < 3 }, spanGaps: true, value: (_, v) => shown(v) });
        if (isLong) {
          tables.push([main[0], trend(main[1])]);
          series.push({ label: `${name}, average`, stroke: ink, width: 2, points: { show: false }, spanGaps: true, value: (_, v) => shown(v) });
        }
      }
      const also = figure.dataset.also && run.column(figure.dataset.also);
      if (also) {
        tables.push(also);
        const mark = colour(runs.length > 1 ? COLOURS[index] : "--orange");
        series.push({ label: runs.length > 1 ? `${name}, validation` : "validation", stroke: mark, width: 1, dash: [4, 4], points: { show: true, size: 6, fill: mark }, spanGaps: true, value: (_, v) => shown(v) });
      }
    });
    return { tables, series };
  }

  function draw(figure, runs) {
    const { tables, series } = seriesOf(figure, runs);
    const box = figure.querySelector(".canvas");
    figure.hidden = !tables.length;
    if (!tables.length) return;
    const data = uPlot.join(tables);
    const labels = series.map((each) => each.label).join("|");
    describe(figure, runs, box);
    if (figure.plot && figure.labels === labels) {
      figure.plot.setData(data);
      return;
    }
    figure.plot?.destroy();
    figure.labels = labels;
    const muted = colour("--muted"), rule = colour("--rule");
    const axis = { stroke: muted, grid: { stroke: rule, width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    figure.plot = new uPlot({
      class: "at-rest", width: box.clientWidth || 320, height: 190, padding: [8, 8, 0, 0],
      legend: { markers: { width: 0, fill: (_, i) => series[i - 1]?.stroke } },
      cursor: { drag: { x: true, y: false } },
      // The legend has values only while the pointer is over the chart.
      hooks: { setCursor: [(plot) => plot.root.classList.toggle("at-rest", plot.cursor.idx === null)] },
      scales: { x: { time: false }, y: { range: valueRange } },
      axes: [
        { ...axis, grid: { show: false }, size: 28, values: (_, ticks) => ticks.map((v) => (Number.isInteger(v) ? shown(v) : "")) },
        { ...axis, size: 52, values: (_plot, ticks, _axis, _space, step) => tickLabels(ticks, step) },
      ],
      series: [{ label: "step", value: (_, v) => shown(v) }, ...series],
    }, data, box);
  }

  function describe(figure, runs, box) {
    const columns = runs.map((run) => run.column(figure.dataset.metric)).filter(Boolean);
    const changes = columns.map(([steps, values]) => (steps.length > 1 ? `${shown(values[0])} → ${shown(values.at(-1))}` : shown(values[0])));
    figure.querySelector(".change").textContent = changes.join(" · ");
    const last = columns.map(([steps]) => shown(steps.at(-1))).join(" and ");
    box.setAttribute("aria-label", `${figure.querySelector(".chart-title").textContent}: ${changes.join(" and ")}, up to step ${last}`);
  }

  // Draws all charts of a block from the metrics of its runs.
  function drawAll(block, runs) {
    const figures = [...block.querySelectorAll("figure.live")];
    figures.forEach((figure) => draw(figure, runs));
    const isAny = figures.some((figure) => !figure.hidden);
    const more = block.querySelector("details.more");
    if (more) more.hidden = ![...more.querySelectorAll("figure.live")].some((figure) => !figure.hidden);
    const waiting = block.querySelector(".waiting");
    if (waiting) waiting.hidden = isAny;
    return isAny;
  }

  function watchSize(block, redraw) {
    new ResizeObserver(() => {
      block.querySelectorAll("figure.live").forEach((figure) => {
        const width = figure.querySelector(".canvas").clientWidth;
        if (figure.plot && width && Math.abs(figure.plot.width - width) > 1) figure.plot.setSize({ width, height: 190 });
      });
    }).observe(block);
    // Canvases do not follow changes of CSS variables, so the charts are redrawn.
    const recolour = () => {
      block.querySelectorAll("figure.live").forEach((figure) => {
        figure.plot?.destroy();
        figure.plot = null;
      });
      redraw();
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
    // In a chat, the host chooses the theme.
    addEventListener("themechange", recolour);
  }

  return { RecordedMetrics, drawAll, watchSize };
})();
