// Creates elements, and finds those of the page.

/** The element with this id. Throws if there is none. */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`no element ${id}`);
  return found;
}

/** An element with attributes and children (nodes or text). Text is never parsed as markup. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** The entries of a definition list. */
export function definitions(pairs) {
  return pairs.map(([term, value]) => make("div", {}, make("dt", {}, term), make("dd", {}, String(value))));
}

/** A number with `digits` decimals; a dash if it is not finite. */
export function fixed(value, digits = 1) {
  return Number.isFinite(value) ? value.toFixed(digits) : "–";
}
