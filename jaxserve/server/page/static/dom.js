// Making elements. Text only ever becomes text nodes; nothing here (or elsewhere) takes markup.

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element. `props`: `class`, `on…` listeners, DOM properties by their names, everything else attributes.
 * Children that are null or false are left out; strings become text.
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name in element && name !== "list" && name !== "role") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An SVG element with attributes. */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** One of the icons that index.html defines. */
export const icon = (name) =>
  s("svg", { class: "icon", "aria-hidden": "true" }, s("use", { href: `#i-${name}` }));

/** A small button with an icon; `label` is read out and shown as a tooltip. */
export const iconButton = (name, label, onclick, props = {}) =>
  h("button", { type: "button", class: "icon-button", title: label, "aria-label": label, onclick, ...props }, icon(name));

export const byId = (id) => document.getElementById(id);

/** Put `text` on the clipboard; also where the page is not a secure context (plain HTTP on another host). */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { value: text, class: "visually-hidden", "aria-hidden": "true" });
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

/** A button that copies what `text()` returns, and says so. */
export function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    const copied = await copyText(text());
    button.replaceChildren(icon(copied ? "check" : "copy"));
    button.title = copied ? "Copied" : "Copying failed";
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.title = label;
    }, 1500);
  });
  return button;
}
