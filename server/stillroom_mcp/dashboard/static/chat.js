"use strict";
// Talks to the host of an MCP App (JSON-RPC over postMessage), and builds HTML elements from text.
const stillroomChat = (() => {
  const PROTOCOL = "2026-01-26";
  const waiting = new Map();
  let lastId = 0;
  let host = {};

  const post = (message) => parent.postMessage({ jsonrpc: "2.0", ...message }, "*");

  function request(method, params) {
    const id = ++lastId;
    post({ id, method, params });
    return new Promise((resolve, reject) => waiting.set(id, { resolve, reject }));
  }

  // Calls a tool of the server; null if the host cannot do so, or if the call failed.
  async function callTool(name, args) {
    try {
      const result = await request("tools/call", { name, arguments: args });
      return result.isError ? null : unfenced(result.structuredContent ?? null);
    } catch {
      return null;
    }
  }

  // Reads a resource of the server as JSON; null if the host cannot do so.
  async function readJson(uri) {
    if (!host.serverResources) return null;
    try {
      return JSON.parse((await request("resources/read", { uri })).contents[0].text);
    } catch {
      return null;
    }
  }

  // The host's theme may differ from the system's.
  function applyTheme(context) {
    if (!context?.theme) return;
    document.documentElement.style.colorScheme = context.theme;
    for (const sheet of document.styleSheets) {
      for (const rule of sheet.cssRules) {
        if (rule instanceof CSSMediaRule && (rule.isTheme || rule.conditionText.includes("prefers-color-scheme"))) {
          rule.isTheme = true;
          rule.media.mediaText = context.theme === "dark" ? "all" : "not all";
        }
      }
    }
    dispatchEvent(new Event("themechange"));
  }

  // Returns an element with a class and children; text is never interpreted as markup.
  function make(tag, name, ...children) {
    const element = document.createElement(tag);
    if (name) element.className = name;
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  function figures(list) {
    return make("dl", "figures", ...list.map(([label, value, note]) =>
      make("div", "", make("dt", "", label), make("dd", "value", value), make("dd", "note", note))));
  }

  // The server puts text from others between marks, which are for agents only.
  const MARK = /^----- (end of )?text [0-9a-f]{16} -----$/;
  function unfenced(value) {
    if (typeof value === "string") return value.split("\n").filter((line) => !MARK.test(line)).join("\n");
    if (Array.isArray(value)) return value.filter((item) => !MARK.test(item)).map(unfenced);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map((pair) => pair.map(unfenced)));
  }

  async function start({ onInput, onResult }) {
    addEventListener("message", (event) => {
      if (event.source !== parent || event.data?.jsonrpc !== "2.0") return;
      const { id, method, params, result, error } = event.data;
      if (method === undefined) {
        const pending = waiting.get(id);
        waiting.delete(id);
        if (error) pending?.reject(new Error(error.message));
        else pending?.resolve(result);
      } else if (method === "ui/notifications/tool-input") onInput?.(params.arguments ?? {});
      else if (method === "ui/notifications/tool-result") onResult(unfenced(params.structuredContent ?? null));
      else if (method === "ui/notifications/host-context-changed") applyTheme(params);
      else if (id !== undefined) post({ id, result: {} });
    });
    const answer = await request("ui/initialize", {
      protocolVersion: PROTOCOL, appInfo: { name: "stillroom", version: "1" }, appCapabilities: {},
    });
    host = answer?.hostCapabilities ?? {};
    applyTheme(answer?.hostContext);
    post({ method: "ui/notifications/initialized", params: {} });
    new ResizeObserver(() => {
      post({ method: "ui/notifications/size-changed", params: { height: Math.ceil(document.documentElement.getBoundingClientRect().height) } });
    }).observe(document.body);
  }

  return { start, callTool, readJson, make, figures };
})();
