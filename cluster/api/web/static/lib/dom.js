// Builds elements. Strings become text nodes, so that no content is ever read as markup.

const SVG = "http://www.w3.org/2000/svg";

export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) set(element, name, value);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function set(element, name, value) {
  if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
  else if (value === true) element.setAttribute(name, "");
  else if (value !== false && value !== null && value !== undefined) {
    element.setAttribute(name, String(value));
  }
}

export function byId(id) {
  return document.getElementById(id);
}

export function replace(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null));
}

// Writes text only if it differs, so that selections and screen readers are left alone.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
