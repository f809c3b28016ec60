"use strict";
// Rows in a chat: conversations with collapsed tool calls or, if a student is given, the trained tokens.
(() => {
  const { start, callTool, make } = stillroomChat;
  const view = document.getElementById("view");
  const ROLE = /^(system|user|assistant|tool)( calls .*|: ?.*)$/;
  let request = {};

  // Returns the text with the parts in ⟦ ⟧ marked as trained.
  function marked(text) {
    const body = make("div", "said tokens");
    text.split(/(⟦[^⟧]*⟧?)/).forEach((piece) => {
      if (!piece) return;
      const isTrained = piece.startsWith("⟦");
      body.append(isTrained ? make("span", "assistant trained", piece.replace(/^⟦|⟧$/g, "")) : piece);
    });
    return body;
  }

  function messages(lines) {
    const parsed = [];
    for (const line of lines) {
      const match = ROLE.exec(line);
      if (match) parsed.push({ role: match[1], isCall: match[2].startsWith(" calls"), lines: [match[2].replace(/^(: ?| calls )/, "")] });
      // Continuation lines are indented; only a line with a role is not.
      else if (parsed.length) parsed.at(-1).lines.push(line.replace(/^ {2}/, ""));
      else parsed.push({ role: "", isCall: false, lines: [line] });
    }
    return parsed;
  }

  function part({ role, isCall, lines }) {
    const text = lines.join("\n");
    const isFolded = isCall || role === "tool" || role === "system";
    if (!isFolded) return make("div", "part", make("span", "who", role), make("div", "said", text));
    const first = `${text.slice(0, 90)}${text.length > 90 ? "…" : ""}`;
    const kind = isCall ? "call" : role === "tool" ? "reply" : "system";
    const summary = make("summary", "", role === "system" ? "System message" : first);
    return make("details", `part folded ${kind}`, summary, make("div", "said", text));
  }

  function example(row) {
    const text = row.text ?? "";
    const facts = [row.format];
    if (row.reward !== null && row.reward !== undefined) facts.push(`reward ${row.reward}`);
    if (row.num_tokens) facts.push(`${row.num_tokens} tokens, ${row.num_trained_tokens} trained`);
    const isMask = row.num_tokens !== null && row.num_tokens !== undefined;
    const body = isMask ? [marked(text)] : messages(text.split("\n")).map(part);
    const problem = row.problem ? make("p", "problem", row.problem.replaceAll("\n", " ")) : null;
    return make("section", "row", make("h2", "", row.where), make("p", "verdict", ...facts.map((fact) => make("span", "", fact))), problem, make("div", isMask ? "" : "conversation", ...body));
  }

  function show(page) {
    if (!page?.examples) return;
    const next = make("button", "", "Next rows");
    next.type = "button";
    next.addEventListener("click", async () => {
      next.disabled = true;
      const { html, ...rest } = request;
      show(await callTool("inspect_examples", { ...rest, start: page.next_start }));
    });
    view.replaceChildren(
      make("h1", "", request.path ?? "Rows", make("span", "", ` · ${page.total_count} rows`)),
      ...page.examples.map(example),
      ...(page.has_more ? [next] : []),
    );
  }

  start({ onInput: (input) => (request = input), onResult: show });
})();
