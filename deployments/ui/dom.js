// Making elements, and finding those of the page.

/** The element with this id; the page always has it. */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`no element ${id}`);
  return found;
}

/** An element with attributes and children (nodes or text). Text is never read as markup. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Pairs of a definition list. */
export function definitions(pairs) {
  return pairs.map(([term, value]) => make("div", {}, make("dt", {}, term), make("dd", {}, String(value))));
}

/** A number with so many digits after the point, or a dash where there is none. */
export function fixed(value, digits = 1) {
  return Number.isFinite(value) ? value.toFixed(digits) : "–";
}
