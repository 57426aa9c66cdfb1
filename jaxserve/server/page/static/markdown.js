// Markdown to DOM nodes, piece by piece while a text streams in.
//
// A small part of CommonMark and of GitHub's tables, chosen for what models write. Nodes are made one by one, and
// text only ever becomes text nodes: whatever a model writes, it stays text. Images are shown as links, since
// fetching them would tell somebody else. Work is linear in the text, nesting is limited.
import { copyButton, h } from "./dom.js";

const MAX_DEPTH = 12;
const MAX_URL = 2048;
const MAX_LABEL = 500;

// --- blocks ---------------------------------------------------------------------------------------------------

const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const DELIMITERS = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const blank = (line) => line.trim() === "";

/** The blocks of `lines`: {type, start, end, …}; `end` is the line after the last one. */
function parseBlocks(lines, depth = 0) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (blank(lines[at])) {
      at += 1;
      continue;
    }
    const block = parseBlock(lines, at, depth);
    blocks.push({ ...block, start: at });
    at = block.end;
  }
  return blocks;
}

function parseBlock(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return parseFence(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return { type: "heading", level: heading[1].length, text: heading[2] ?? "", end: at + 1 };
  if (RULE.test(line)) return { type: "rule", end: at + 1 };
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) return parseQuote(lines, at, depth);
    if (ITEM.test(line)) return parseList(lines, at, depth);
  }
  if (isTableHead(lines, at)) return parseTable(lines, at);
  return parseParagraph(lines, at, depth);
}

function parseFence(lines, at, [, indent, marks, language]) {
  const closing = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const unindent = new RegExp(`^ {0,${indent.length}}`);
  const code = lines.slice(at + 1, end).map((line) => (indent ? line.replace(unindent, "") : line));
  return { type: "code", language, code, closed: end < lines.length, end: Math.min(end + 1, lines.length) };
}

function parseQuote(lines, at, depth) {
  const inner = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    if (QUOTE.test(lines[end])) inner.push(lines[end].replace(QUOTE, ""));
    else if (!blank(lines[end]) && !blank(inner.at(-1)) && !startsBlock(lines[end])) inner.push(lines[end]);
    else break;
  }
  return { type: "quote", blocks: parseBlocks(inner, depth + 1), end };
}

const startsBlock = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);

/** A list's items are what is indented under their markers; a line that goes on with a paragraph needs no indent. */
function parseList(lines, at, depth) {
  const [, , firstMarker] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(firstMarker);
  const kind = firstMarker.at(-1);
  const items = [];
  let loose = false;
  let end = at;
  while (end < lines.length) {
    const match = ITEM.exec(lines[end]);
    if (!match || match[2].at(-1) !== kind || RULE.test(lines[end])) break;
    const offset = match[1].length + match[2].length + (match[3].length > 4 ? 1 : Math.max(1, match[3].length));
    const inner = [lines[end].slice(offset)];
    end += 1;
    let gap = 0;
    for (; end < lines.length; end += 1) {
      const line = lines[end];
      if (blank(line)) {
        gap += 1;
        inner.push("");
      } else if (indentOf(line) >= Math.min(offset, 2 + match[1].length) && indentOf(line) > match[1].length) {
        if (gap) loose ||= !ITEM.test(line.slice(Math.min(offset, indentOf(line))));
        inner.push(line.slice(Math.min(offset, indentOf(line))));
        gap = 0;
      } else if (!gap && !startsBlock(line)) inner.push(line);
      else break;
    }
    if (gap && end < lines.length && ITEM.exec(lines[end])?.[2].at(-1) === kind) loose = true;
    while (inner.length > 1 && blank(inner.at(-1))) inner.pop();
    items.push(itemOf(inner, depth));
  }
  return { type: "list", ordered, first: ordered ? Number.parseInt(firstMarker, 10) : 1, loose, items, end };
}

const indentOf = (line) => line.length - line.trimStart().length;

function itemOf(lines, depth) {
  const task = /^\[([ xX])\]\s+/.exec(lines[0]);
  if (task) lines[0] = lines[0].slice(task[0].length);
  return { checked: task ? task[1] !== " " : null, blocks: parseBlocks(lines, depth + 1) };
}

function isTableHead(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !DELIMITERS.test(lines[at + 1])) return false;
  return cellsOf(lines[at]).length === cellsOf(lines[at + 1]).length;
}

function parseTable(lines, at) {
  const head = cellsOf(lines[at]);
  const delimiters = cellsOf(lines[at + 1]);
  const align = delimiters.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && !blank(lines[end]) && lines[end].includes("|"); end += 1) {
    const cells = cellsOf(lines[end]);
    rows.push(head.map((_, column) => cells[column] ?? ""));
  }
  return { type: "table", head, align, rows, end };
}

/** The cells of a row; a bar after a backslash, or between backticks, is text. */
function cellsOf(line) {
  const cells = [""];
  let code = false;
  const text = line.trim().replace(/^\|/, "");
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") cells[cells.length - 1] += text[(at += 1)];
    else if (text[at] === "|" && !(code && text.includes("`", at))) cells.push("");
    else {
      if (text[at] === "`") code = !code;
      cells[cells.length - 1] += text[at];
    }
  }
  if (cells.length > 1 && blank(cells.at(-1))) cells.pop();
  return cells.map((cell) => cell.trim());
}

function parseParagraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !blank(lines[end]) && !(depth < MAX_DEPTH && interrupts(lines, end))) end += 1;
  return { type: "paragraph", text: lines.slice(at, end).join("\n"), end };
}

function interrupts(lines, at) {
  const line = lines[at];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  if (item && item[3] !== "" && (!/\d/.test(item[2]) || /^1[.)]$/.test(item[2]))) return true;
  return isTableHead(lines, at);
}

// --- text -----------------------------------------------------------------------------------------------------

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const AUTOLINK = /^(?:https?:\/\/|mailto:)[^\s<>"'`]+/i;
const SCHEME = /^(?:https?:|mailto:)/i;

/** The nodes of a paragraph's text. */
export function inline(text, depth = 0) {
  const nodes = [];
  const missing = new Set(); // closing marks that are known not to come: each is looked for once
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
  };
  while (at < text.length) {
    const found = depth < MAX_DEPTH ? spanAt(text, at, depth, missing) : null;
    if (found) {
      flush();
      if (found.node) nodes.push(found.node);
      else plain += found.text;
      at = found.end;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  flush();
  return nodes;
}

function spanAt(text, at, depth, missing) {
  const mark = text[at];
  switch (mark) {
    case "\\":
      if (text[at + 1] === "\n") return { node: h("br"), end: at + 2 };
      return PUNCTUATION.test(text[at + 1] ?? "") ? { text: text[at + 1], end: at + 2 } : null;
    case "\n":
      return { node: h("br"), end: at + 1 };
    case "`":
      return codeAt(text, at, missing);
    case "*":
    case "_":
    case "~":
      return emphasisAt(text, at, depth, missing);
    case "!":
      return text[at + 1] === "[" ? linkAt(text, at + 1, depth, missing, true) : null;
    case "[":
      return linkAt(text, at, depth, missing, false);
    case "<": {
      const match = /^<((?:https?:\/\/|mailto:)[^\s<>]{1,2048})>/i.exec(text.slice(at, at + MAX_URL + 2));
      return match ? { node: anchor(match[1], [match[1]]), end: at + match[0].length } : null;
    }
    case "h":
    case "H":
    case "m":
    case "M":
      return bareLinkAt(text, at);
    default:
      return null;
  }
}

function codeAt(text, at, missing) {
  let length = 1;
  while (text[at + length] === "`") length += 1;
  const marks = "`".repeat(length);
  if (!missing.has(marks)) {
    let end = text.indexOf(marks, at + length);
    while (end >= 0 && text[end + length] === "`") {
      let after = end + length;
      while (text[after] === "`") after += 1;
      end = text.indexOf(marks, after);
    }
    if (end >= 0) {
      let code = text.slice(at + length, end).replaceAll("\n", " ");
      if (code.startsWith(" ") && code.endsWith(" ") && !blank(code)) code = code.slice(1, -1);
      return { node: h("code", {}, code), end: end + length };
    }
    missing.add(marks);
  }
  return { text: marks, end: at + length };
}

const TAGS = { "*": ["em", "strong"], _: ["em", "strong"], "~": ["del", "del"] };

function emphasisAt(text, at, depth, missing) {
  const mark = text[at];
  let length = 1;
  while (text[at + length] === mark) length += 1;
  const after = text[at + length] ?? " ";
  const literal = { text: mark.repeat(length), end: at + length };
  if (/\s/.test(after) || length > 3 || (mark === "~" && length !== 2)) return literal;
  if (mark === "_" && WORD.test(text[at - 1] ?? "")) return literal;
  const marks = mark.repeat(length);
  if (missing.has(marks)) return literal;
  const end = closingOf(text, at + length, mark, length);
  if (end < 0) {
    missing.add(marks);
    return literal;
  }
  const inner = inline(text.slice(at + length, end), depth + 1);
  const [single, double] = TAGS[mark];
  let node = h(length === 1 ? single : double, {}, ...inner);
  if (length === 3) node = h("em", {}, node);
  return { node, end: end + length };
}

/** Where `length` marks close: a run that long or longer after something that is no space; code is skipped. */
function closingOf(text, from, mark, length) {
  for (let at = from; at < text.length; at += 1) {
    if (text[at] === "\\") at += 1;
    else if (text[at] === "`") {
      const end = text.indexOf("`", at + 1);
      if (end > 0) at = end;
    } else if (text[at] === mark) {
      let run = 1;
      while (text[at + run] === mark) run += 1;
      const closes = at > from && !/\s/.test(text[at - 1]);
      const inWord = mark === "_" && WORD.test(text[at + run] ?? "");
      // `**a *b***`: the last marks of a longer run close the outer span.
      if (closes && !inWord && (run === length || (run > length && run - length !== length))) return at + run - length;
      at += run - 1;
    }
  }
  return -1;
}

/** `[text](url "title")`; `![…](…)` becomes a link, too. Text without a sound address stays as it is. */
function linkAt(text, at, depth, missing, image) {
  if (missing.has("](")) return null;
  let nesting = 0;
  let close = at;
  const last = Math.min(text.length, at + MAX_LABEL);
  for (; close < last; close += 1) {
    if (text[close] === "\\") close += 1;
    else if (text[close] === "[") nesting += 1;
    else if (text[close] === "]" && (nesting -= 1) === 0) break;
  }
  if (close >= last || text[close + 1] !== "(") {
    if (text.indexOf("](", at) < 0) missing.add("](");
    return null;
  }
  const match = /^\(\s*<?((?:[^\s()<>]|\([^\s()<>]*\))*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/.exec(
    text.slice(close + 1, close + 1 + MAX_URL),
  );
  if (!match || !SCHEME.test(match[1])) return null;
  const label = text.slice(at + 1, close);
  const end = close + 1 + match[0].length;
  if (image) return { node: anchor(match[1], [`Image: ${label || match[1]}`]), end };
  return { node: anchor(match[1], depth + 1 < MAX_DEPTH ? withoutLinks(inline(label, depth + 1)) : [label]), end };
}

function withoutLinks(nodes) {
  return nodes.map((node) => (node.nodeName === "A" ? document.createTextNode(node.textContent) : node));
}

function bareLinkAt(text, at) {
  if (at > 0 && WORD.test(text[at - 1])) return null;
  const match = AUTOLINK.exec(text.slice(at, at + MAX_URL));
  if (!match) return null;
  let url = match[0].replace(/[.,;:!?*_~\]}]+$/, "");
  while (url.endsWith(")") && url.split(")").length > url.split("(").length) url = url.slice(0, -1);
  return /^(?:https?:\/\/|mailto:)./i.test(url) ? { node: anchor(url, [url]), end: at + url.length } : null;
}

/** A link that opens elsewhere and tells nothing about us. */
function anchor(href, children) {
  let url;
  try {
    url = new URL(href);
  } catch {
    return h("span", {}, ...children);
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return h("span", {}, ...children);
  return h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }, ...children);
}

// --- nodes ----------------------------------------------------------------------------------------------------

function render(block) {
  switch (block.type) {
    case "heading":
      // The page's own headings are h1 and h2.
      return h(`h${Math.min(6, block.level + 2)}`, { class: `heading-${block.level}` }, ...inline(block.text));
    case "rule":
      return h("hr");
    case "code":
      return codeBlock(block.language, block.code.join("\n"));
    case "quote":
      return h("blockquote", {}, ...block.blocks.map(render));
    case "list":
      return renderList(block);
    case "table":
      return renderTable(block);
    default:
      return h("p", {}, ...inline(block.text));
  }
}

function renderList(block) {
  const items = block.items.map((item) => {
    const parts = item.blocks.flatMap((inner) =>
      inner.type === "paragraph" && !block.loose ? inline(inner.text) : [render(inner)],
    );
    if (item.checked === null) return h("li", {}, ...parts);
    const box = h("input", { type: "checkbox", checked: item.checked, disabled: true, "aria-label": item.checked ? "done" : "to do" });
    return h("li", { class: "task" }, box, ...parts);
  });
  return block.ordered ? h("ol", { start: block.first }, ...items) : h("ul", {}, ...items);
}

function renderTable({ head, align, rows }) {
  const cell = (tag, text, column) => h(tag, { class: align[column] ? `align-${align[column]}` : null }, ...inline(text));
  const row = (tag, cells) => h("tr", {}, ...cells.map((text, column) => cell(tag, text, column)));
  const table = h("table", {}, h("thead", {}, row("th", head)), h("tbody", {}, ...rows.map((cells) => row("td", cells))));
  return h("div", { class: "table", tabIndex: 0, role: "region", "aria-label": "Table" }, table);
}

/** A code block with its language and a button that copies it. */
export function codeBlock(language, code) {
  const element = h("code", {}, code);
  return h(
    "figure",
    { class: "code" },
    h("figcaption", {}, h("span", {}, language || "text"), copyButton(() => element.textContent, "Copy code")),
    h("pre", { tabIndex: 0 }, element),
  );
}

// --- streaming ------------------------------------------------------------------------------------------------

/**
 * A text that grows, as nodes in `container`. Blocks that no further text can change are made once; only the last one
 * is made again, and a code block grows in place.
 */
export class MarkdownStream {
  constructor(container) {
    this.container = container;
    this.source = "";
    this.pending = 0; // where the blocks begin that may still change
    this.tail = []; // their nodes
    this.openCode = null; // {block, node} of a last block that is code
  }

  /** Show `source`, which begins with what was shown before (else all is made anew). */
  update(source, final = false) {
    if (!source.startsWith(this.source)) {
      this.container.replaceChildren();
      Object.assign(this, { pending: 0, tail: [], openCode: null });
    } else if (source.length === this.source.length && !final) return;
    this.source = source;
    const text = source.slice(this.pending);
    const lines = text.split("\n");
    const blocks = parseBlocks(lines);
    const firstOpen = final ? blocks.length : this.#firstOpen(blocks, lines);
    if (this.#growCode(blocks, firstOpen)) return;
    const nodes = blocks.map(render);
    for (const node of this.tail) node.remove();
    this.container.append(...nodes);
    this.tail = nodes.slice(firstOpen);
    this.openCode = null;
    const last = blocks.at(-1);
    if (firstOpen === blocks.length - 1 && last?.type === "code") {
      this.openCode = { language: last.language, text: last.code.join("\n"), node: nodes.at(-1).querySelector("code") };
    }
    if (firstOpen < blocks.length) this.pending += offsetOf(lines, blocks[firstOpen].start);
    else if (final) this.pending = source.length;
  }

  /**
   * The first block that may change: the last one, unless it is so short that it may yet turn out to belong to the
   * one before (an item's number without its dot), or to be another kind (a table without its second line).
   */
  #firstOpen(blocks, lines) {
    let first = Math.max(0, blocks.length - 1);
    while (first > 0 && blocks[first].start >= lines.length - 2) first -= 1;
    return first;
  }

  #growCode(blocks, firstOpen) {
    const [block] = blocks;
    if (!this.openCode || blocks.length !== 1 || firstOpen !== 0 || block.language !== this.openCode.language) return false;
    const text = block.code.join("\n");
    if (!text.startsWith(this.openCode.text)) return false;
    this.openCode.node.append(text.slice(this.openCode.text.length));
    this.openCode.text = text;
    return true;
  }
}

function offsetOf(lines, index) {
  let offset = 0;
  for (let at = 0; at < index; at += 1) offset += lines[at].length + 1;
  return offset;
}
