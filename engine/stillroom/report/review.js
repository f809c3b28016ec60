"use strict";
(() => {
  const bar = document.getElementById("bar");
  const cards = [...document.querySelectorAll(".card")];
  const key = "stillroom-review-" + bar.dataset.key;
  const verdicts = load();
  let current = -1;
  let isSaved = true;

  // Some browsers have no local storage for file:// pages: then only the download keeps verdicts.
  function load() {
    try {
      return JSON.parse(localStorage.getItem(key)) || {};
    } catch {
      return {};
    }
  }
  function store() {
    isSaved = false;
    try {
      localStorage.setItem(key, JSON.stringify(verdicts));
    } catch {
      // The page warns before it closes.
    }
  }
  function show() {
    cards.forEach((card, index) => {
      const { verdict = null, notes = "" } = verdicts[index] || {};
      card.dataset.judged = verdict || "";
      card.querySelectorAll("button").forEach((button) => {
        button.setAttribute("aria-pressed", String(button.dataset.verdict === verdict));
      });
      card.querySelector("input").value = notes;
    });
    const done = cards.filter((_, index) => verdicts[index]?.verdict).length;
    document.getElementById("count").textContent = `${done} of ${cards.length} judged`;
  }
  function judge(index, verdict) {
    const before = verdicts[index] || {};
    verdicts[index] = { ...before, verdict: before.verdict === verdict ? null : verdict };
    store();
    show();
  }
  function goTo(index) {
    if (index < 0 || index >= cards.length) return;
    current = index;
    cards[index].focus({ preventScroll: true });
    cards[index].scrollIntoView({ block: "start" });
  }
  function goToUnjudged() {
    const after = cards.findIndex((_, index) => index > current && !verdicts[index]?.verdict);
    goTo(after >= 0 ? after : cards.findIndex((_, index) => !verdicts[index]?.verdict));
  }
  function download() {
    const lines = cards.map((card, index) => {
      const { verdict = null, notes = "" } = verdicts[index] || {};
      return JSON.stringify({ id: card.dataset.id, where: card.dataset.where, verdict, notes }) + "\n";
    });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(lines, { type: "application/jsonl" }));
    link.download = bar.dataset.file;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    isSaved = true;
  }

  cards.forEach((card, index) => {
    card.addEventListener("focusin", () => (current = index));
    card.addEventListener("click", (event) => {
      const verdict = event.target.dataset.verdict;
      if (verdict) judge(index, verdict);
    });
    card.querySelector("input").addEventListener("input", (event) => {
      verdicts[index] = { ...(verdicts[index] || {}), notes: event.target.value };
      store();
    });
  });
  document.addEventListener("keydown", (event) => {
    if (event.target.tagName === "INPUT" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "j") goTo(current + 1);
    if ((event.key === "k" || event.key === "d") && current >= 0) {
      verdicts[current] = { ...(verdicts[current] || {}), verdict: event.key === "k" ? "keep" : "drop" };
      store();
      show();
      goTo(current + 1);
    }
  });
  document.getElementById("next").addEventListener("click", goToUnjudged);
  document.getElementById("download").addEventListener("click", download);
  addEventListener("beforeunload", (event) => {
    if (!isSaved) event.preventDefault();
  });
  show();
})();
