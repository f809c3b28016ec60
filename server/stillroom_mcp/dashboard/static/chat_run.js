"use strict";
// A run in a chat: the report of get_run, and the curves of its metrics.
(() => {
  const { start, callTool, readJson, make, figures } = stillroomChat;
  const POLL_MS = 2000;
  const ENDED = ["succeeded", "failed", "cancelled", "interrupted"];
  const CURVES = [
    ["teacher_kl", "Reverse KL to the teacher", "nats per token"], ["loss", "Loss", "", "val_loss"],
    ["reward", "Reward", "mean of the batch"], ["succeeded", "Rollouts", "succeeded"], ["cost_usd", "Spent", "US dollars"],
    ["tokens_per_s", "Trained tokens", "per second"], ["calls_per_s", "Calls", "per second"],
  ];
  const view = document.getElementById("view");
  const head = make("div"), block = make("div", "curves"), charts = make("div", "charts");
  let recorded = new stillroomCharts.RecordedMetrics();
  let runId = null, lastStep = -1;

  for (const [metric, title, unit, also] of CURVES) {
    const canvas = make("div", "canvas");
    canvas.setAttribute("role", "img");
    const figure = make("figure", "chart live", make("figcaption", "", make("span", "chart-title", title), make("span", "number change"), make("span", "unit", unit)), canvas);
    Object.assign(figure.dataset, { metric, also: also ?? "" });
    figure.hidden = true;
    charts.append(figure);
  }
  block.append(charts);

  const number = (value) => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en").replaceAll(",", " ") : String(Number(value.toPrecision(3))));

  function seconds(value) {
    if (value < 60) return `${value.toFixed(0)} s`;
    return value < 3600 ? `${Math.floor(value / 60)} min ${Math.round(value % 60)} s` : `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  }

  function show(run) {
    const facts = [];
    const { progress, metrics = {} } = run;
    if (progress?.total) facts.push(["Done", `${(100 * Math.min(1, progress.done / progress.total)).toFixed(1)} %`, `${progress.done} of ${progress.total} ${progress.unit}`]);
    if (progress?.eta_s) facts.push(["Time left", seconds(progress.eta_s), "estimate"]);
    for (const [metric, title, unit] of CURVES) {
      const value = metrics[metric];
      if (typeof value === "number") facts.push([title, metric === "cost_usd" ? `$${value.toFixed(4)}` : number(value), unit || "now"]);
    }
    if (typeof run.machine_usd === "number") facts.push(["Machine", `$${run.machine_usd.toFixed(2)}`, run.where]);
    const alarms = (run.alarms ?? []).map((alarm) => make("li", "", alarm));
    head.replaceChildren(
      make("h1", "", run.run_id.slice(0, run.run_id.indexOf("-") + 7), make("span", "", ` · ${run.kind} `), make("span", `status ${run.status}`, run.status)),
      ...(run.error ? [make("div", "problem", make("p", "", run.error.problem), make("p", "muted", `Fix: ${run.error.fix}`))] : []),
      ...(run.where ? [make("p", "small muted", `On ${run.where}, ${run.last_contact ? `last contact ${run.last_contact.slice(0, 16).replace("T", " ")} UTC` : "not reached yet"}.`)] : []),
      ...(run.unreachable ? [make("div", "problem", make("p", "", `The run cannot be followed at the moment: ${run.unreachable}`), make("p", "muted", "Stillroom keeps trying; a run that has started continues on its machine."))] : []),
      figures(facts.slice(0, 6)),
      ...(alarms.length ? [make("ul", "alarms", ...alarms)] : []),
    );
    if (!head.isConnected) view.replaceChildren(head, block);
  }

  // Reads a sample of all steps; if the host cannot read resources, the last steps from the log.
  async function readMetrics() {
    const all = await readJson(`run://${runId}/metrics`);
    if (all?.steps) {
      recorded = new stillroomCharts.RecordedMetrics();
      recorded.add({ ...all, next: 0 });
    } else {
      await readLastMetrics();
    }
    stillroomCharts.drawAll(block, [recorded]);
  }

  async function readLastMetrics() {
    const page = await callTool("get_run_logs", { run_id: runId, source: "events", lines: 500 });
    const steps = [], rows = [];
    for (const line of page?.lines ?? []) {
      try {
        const event = JSON.parse(line);
        if (event.event !== "metrics" || event.step <= lastStep) continue;
        lastStep = event.step;
        steps.push(event.step);
        rows.push(event.values);
      } catch {
        // An incomplete line.
      }
    }
    const values = {};
    rows.forEach((row, i) => Object.entries(row).forEach(([name, value]) => ((values[name] ??= Array(steps.length).fill(null))[i] = value)));
    if (steps.length) recorded.add({ steps, values, next: 0 });
  }

  async function follow(run) {
    while (run) {
      show(run);
      await readMetrics();
      if (ENDED.includes(run.status)) return;
      await new Promise((done) => setTimeout(done, POLL_MS));
      run = (await callTool("get_run", { run_id: runId })) ?? null;
    }
  }

  function receive(result) {
    if (!result?.run_id || runId) return;
    runId = result.run_id;
    follow(result);
  }

  stillroomCharts.watchSize(block, () => stillroomCharts.drawAll(block, [recorded]));
  start({ onResult: receive });
})();
