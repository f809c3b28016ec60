"use strict";
(() => {
  const POLL_MS = 1000;

  async function follow(block) {
    const sources = block.dataset.sources.split(" ");
    const runs = sources.map(() => new stillroomCharts.RecordedMetrics());
    const hasEnded = sources.map(() => false);
    stillroomCharts.watchSize(block, () => stillroomCharts.drawAll(block, runs));
    // Charts in a closed <details> had no width when they were drawn.
    block.querySelector("details.more").addEventListener("toggle", () => stillroomCharts.drawAll(block, runs));
    while (hasEnded.includes(false)) {
      if (!document.hidden) {
        let isNew = false;
        for (const [index, source] of sources.entries()) {
          if (hasEnded[index]) continue;
          const part = await fetchJson(`${source}?from=${runs[index].next}`);
          if (part === null) continue;
          isNew ||= part.steps.length > 0;
          runs[index].add(part);
          hasEnded[index] = part.is_final && !part.has_more;
        }
        if (isNew) stillroomCharts.drawAll(block, runs);
      }
      await new Promise((done) => setTimeout(done, POLL_MS));
    }
    // A run without steps, such as an export, has no curves.
    if (!stillroomCharts.drawAll(block, runs)) block.closest("section").hidden = true;
  }

  async function fetchJson(address) {
    try {
      const answer = await fetch(address);
      return answer.ok ? await answer.json() : null;
    } catch {
      return null;
    }
  }

  function moveFocus(by) {
    const rows = [...document.querySelectorAll(".rows-list > li > details > summary")];
    if (!rows.length) return;
    const at = rows.findIndex((row) => row.parentElement.contains(document.activeElement));
    rows[Math.min(rows.length - 1, Math.max(0, at + by))].focus();
  }

  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "j") moveFocus(1);
    else if (event.key === "k") moveFocus(-1);
    else if (/^[a-z]$/.test(event.key)) document.querySelector(`a[data-key="${event.key}"]`)?.click();
  });
  document.querySelectorAll(".curves").forEach(follow);
})();
