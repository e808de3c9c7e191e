"use strict";
// The facts of an operator as text. All texts come ready from the report's data, and are set as text: none is read as HTML.

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function factsTable(facts) {
  const list = element("dl");
  for (const [name, value] of facts) list.append(element("dt", {}, name), element("dd", {}, value));
  return list;
}

// What tuning measured: a bar for each candidate, the chosen one marked.
function candidatesTable(candidates) {
  const slowest = Math.max(...candidates.map(([, us]) => us)), rows = element("ul", { class: "candidates" });
  for (const [name, us, chosen] of candidates) {
    const bar = element("i", { "aria-hidden": "true" });
    bar.style.width = `${100 * us / slowest}%`;
    rows.append(element("li", chosen ? { class: "chosen" } : {}, element("span", {}, chosen ? `${name}, chosen` : name),
                        element("span", { class: "num" }, `${us.toPrecision(4)} µs`), bar));
  }
  return rows;
}

// Lists with many lines are closed at first.
function factsList(title, lines) {
  const list = element("ul", { class: "lines" }, ...lines.map((line) => element("li", {}, line)));
  const box = element("details", lines.length <= 8 ? { open: "" } : {}, element("summary", {}, `${title} (${lines.length})`), list);
  return box;
}

// Fill `panel` with what is known of a node. `neighbors` are [title, nodes]; `select` is called with the one that is chosen.
function showFacts(panel, node, texts, neighbors, select) {
  const parts = [element("h3", {}, node.label)];
  if (node.name) parts.push(element("p", { class: "names" }, element("code", {}, node.name)));
  parts.push(factsTable(node.facts));
  if (node.candidates.length) parts.push(element("h4", {}, "Candidates and their times"), candidatesTable(node.candidates));
  for (const [title, lines] of node.lists) parts.push(factsList(title, lines.map((k) => texts[k])));
  for (const [title, others] of neighbors) {
    if (!others.length) continue;
    const line = element("p", { class: "neighbors" }, `${title}: `);
    for (const other of others.slice(0, 12)) {
      const button = element("button", { type: "button", class: "link" }, other.label);
      button.addEventListener("click", () => select(other.id));
      line.append(button, " ");
    }
    if (others.length > 12) line.append(`and ${others.length - 12} more`);
    parts.push(line);
  }
  panel.replaceChildren(...parts);
}
