// What the theme leaves out for people who use a screen reader or a keyboard.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  // The theme adds these while the page loads.
  new MutationObserver(label).observe(document.body, { childList: true, subtree: true });
  label();
});

function label() {
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach((nav, number) => {
    nav.setAttribute("aria-label", `Code block ${number + 1}`);
  });
  document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])").forEach((table) => {
    table.tabIndex = 0;
  });
}
