// Elements from plain values. Text is only ever set as text: names of files and classes are anybody's.
export function h(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "circle", "line", "text", "g", "polyline", "polygon"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(
    ...children
      .flat(Infinity)
      .filter(child => child !== null && child !== undefined && child !== false)
      .map(child => (child instanceof Node ? child : document.createTextNode(String(child)))),
  );
  return node;
}

export const number = value => value.toLocaleString("en");
export const percent = (value, digits = 0) =>
  value === null || value === undefined ? "–" : `${value.toFixed(digits)} %`;
export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
export const hue = id => `hsl(${Math.round(id * 137.508) % 360} 62% 48%)`;
export const dot = id => h("i", {class: "dot", vars: {"--hue": hue(id)}, "aria-hidden": "true"});

export function say(text) {
  document.getElementById("live").textContent = text;
}

export function toast(text, {action, act, bad = false, seconds = 6} = {}) {
  const box = h(
    "div",
    {class: bad ? "toast bad" : "toast", role: bad ? "alert" : "status"},
    h("span", {}, text),
    action &&
      h(
        "button",
        {
          type: "button",
          onclick: () => {
            box.remove();
            act();
          },
        },
        action,
      ),
  );
  document.getElementById("toasts").replaceChildren(box);
  setTimeout(() => box.remove(), 1000 * seconds);
}

export function dialog(title, ...content) {
  const close = () => box.close();
  const box = h(
    "dialog",
    {"aria-label": title, onclose: () => box.remove(), onclick: e => e.target === box && close()},
    h(
      "div",
      {class: "dialog"},
      h(
        "header",
        {},
        h("h2", {}, title),
        h("button", {type: "button", class: "plain", "aria-label": "Close", onclick: close}, "✕"),
      ),
      ...content,
    ),
  );
  document.body.append(box);
  box.showModal();
  return box;
}
