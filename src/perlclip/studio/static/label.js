// One image at a time, the one worth most first.
import {dot, h, number, percent, say} from "./dom.js";
import {NONE, SKIPPED, className, guessOf, imageName, label, store, thumbnail, undo, view} from "./store.js";
import {openLook} from "./look.js";

const KEYS = 9;
let current = null,
  top = [],
  trail = [],
  search = "",
  wanted = 0,
  asked = 0,
  drawn = "";

const free = place => store.label[place] === NONE;
const waiting = () => store.state.queue.map(([place]) => place).filter(place => free(place) && place !== current);
function upcoming() {
  const [first] = waiting();
  if (!store.state.guesses) return -1; // in a moment
  return first !== undefined ? first : store.label.findIndex((value, place) => value === NONE && place !== current);
}
export function show(place) {
  if (place === null || place < 0) {
    current = null;
    return;
  }
  current = place;
  wanted += 1; // what was asked for another one comes too late
  search = "";
  const queued = store.state.queue.find(([other]) => other === place);
  top = queued ? queued[1] : [];
  if (!queued) again();
  for (const next of waiting().slice(0, 2)) new Image().src = view(next);
}
function again() {
  const mine = ++wanted;
  asked = store.state.guesses;
  guessOf(current).then(
    found => {
      if (mine === wanted) {
        top = found.top;
        render();
      }
    },
    () => {},
  );
}
function advance() {
  if (current !== null) trail.push(current);
  trail = trail.slice(-500);
  show(upcoming());
  render();
}
function choose(id) {
  if (current !== null) {
    label([current], id);
    advance();
  }
}
function choices() {
  const all = [...store.classes.keys()],
    p = new Map(top);
  if (search) {
    const word = search.toLowerCase();
    return all
      .filter(id => className(id).toLowerCase().includes(word))
      .slice(0, KEYS)
      .map(id => [id, p.get(id)]);
  }
  if (all.length <= KEYS || !top.length) return all.slice(0, KEYS).map(id => [id, p.get(id)]);
  return top;
}

let root = null;
export function mount(main) {
  root = h("section", {class: "labelling"});
  drawn = "";
  main.replaceChildren(root);
  if (current === null || !free(current)) show(upcoming());
  render();
}
export function update() {
  if (!root?.isConnected) return;
  if (current === null) show(upcoming());
  const queued = store.state.queue.find(([place]) => place === current);
  if (queued) top = queued[1];
  else if (current !== null && asked !== store.state.guesses) again();
  if (document.activeElement?.closest?.(".find") === null || !search) render();
}
store.addEventListener("undone", e => {
  if (root?.isConnected) {
    show(e.detail[0]);
    render();
  }
});

function render() {
  if (!root?.isConnected) return;
  const {images, looked, unreadable} = store.state;
  const done = store.label.reduce((sum, value) => sum + (value !== NONE), 0),
    next = waiting().slice(0, 14);
  const now = JSON.stringify([
    current,
    top,
    next,
    done,
    search,
    store.label[current],
    looked,
    store.state.guesses > 0,
    store.state.classes,
  ]);
  if (now === drawn) return;
  drawn = now;
  if (current === null) {
    const soon = !store.state.guesses || looked + unreadable < images;
    root.replaceChildren(
      h(
        "div",
        {class: "empty"},
        h("h2", {}, soon ? "Looking at the images …" : "Every image has a label"),
        h(
          "p",
          {class: "soft"},
          soon
            ? "The first ones to label are here in a moment."
            : "Look at what is doubtful under Check, then take your adapter home.",
        ),
      ),
    );
    return;
  }
  const focus = document.activeElement?.closest?.("[data-keep]")?.dataset.keep;
  const found = choices(),
    best = top[0]?.[0],
    given = store.label[current];
  const list = h(
    "ol",
    {class: "choices", "aria-label": "Classes"},
    found.map(([id, p], i) =>
      h(
        "li",
        {},
        h(
          "button",
          {
            type: "button",
            class: id === best ? "choice best" : "choice",
            "data-keep": `choice ${id}`,
            "aria-pressed": String(given === id),
            vars: {"--p": `${Math.round(100 * (p ?? 0))}%`},
            onclick: () => choose(id),
          },
          h("kbd", {}, i + 1),
          dot(id),
          h("span", {class: "name"}, className(id)),
          h("span", {class: "soft"}, p === undefined ? "" : percent(100 * p)),
        ),
      ),
    ),
  );
  const field =
    store.classes.size > KEYS &&
    h("input", {
      class: "find",
      type: "search",
      value: search,
      "data-keep": "find",
      placeholder: `Find among ${store.classes.size} classes (/)`,
      "aria-label": "Find a class",
      oninput: e => {
        search = e.target.value;
        render();
      },
      onkeydown: e => {
        if (e.key === "Enter" && search && choices().length) {
          e.preventDefault();
          e.stopPropagation();
          choose(choices()[0][0]);
          root.querySelector(".find")?.blur();
        }
        if (e.key === "Escape") {
          search = "";
          e.target.blur();
          render();
        }
      },
    });
  const same = root.querySelector(".stage img")?.dataset.place === String(current);
  const stage = same
    ? root.querySelector(".stage")
    : h(
        "figure",
        {class: "stage"},
        h("img", {
          src: view(current),
          alt: imageName(current),
          "data-place": current,
          onload: e => {
            e.target.classList.toggle("small", e.target.naturalWidth < 200);
          },
        }),
        h("figcaption", {}, imageName(current)),
      );
  const status = given === SKIPPED ? "skipped" : given !== NONE ? className(given) : "";
  root.replaceChildren(
    stage,
    h(
      "div",
      {class: "side"},
      h(
        "div",
        {class: "tally"},
        h("strong", {}, number(done)),
        ` of ${number(images)} done`,
        status && h("span", {class: "badge"}, status),
      ),
      h("progress", {max: images, value: done, "aria-label": "Images done"}),
      field,
      list,
      h(
        "div",
        {class: "acts"},
        h(
          "button",
          {
            type: "button",
            class: "primary",
            "data-keep": "confirm",
            disabled: best === undefined,
            onclick: confirmGuess,
          },
          h("kbd", {}, "↵"),
          best === undefined ? " No guess yet" : ` ${className(best)}`,
        ),
        h("button", {type: "button", "data-keep": "skip", onclick: skip}, h("kbd", {}, "x"), " Skip"),
        h("button", {type: "button", "data-keep": "undo", onclick: undo}, h("kbd", {}, "z"), " Undo"),
        h(
          "button",
          {type: "button", "data-keep": "look", onclick: () => openLook(current)},
          h("kbd", {}, "l"),
          " Look inside",
        ),
      ),
    ),
    h(
      "div",
      {class: "strip", "aria-label": "Next images"},
      next.map(place =>
        h(
          "button",
          {
            type: "button",
            class: "thumb",
            "data-keep": `next ${place}`,
            "aria-label": `Go to ${imageName(place)}`,
            onclick: () => {
              trail.push(current);
              show(place);
              render();
            },
          },
          h("img", {src: thumbnail(place), alt: "", loading: "lazy"}),
        ),
      ),
    ),
  );
  const again = focus && root.querySelector(`[data-keep="${CSS.escape(focus)}"]`);
  if (again) {
    again.focus();
    if (focus === "find") again.setSelectionRange(search.length, search.length);
  }
}
function confirmGuess() {
  if (top.length) choose(top[0][0]);
}
function skip() {
  if (current !== null) {
    label([current], SKIPPED);
    advance();
  }
}

export function key(e) {
  if (/^[1-9]$/.test(e.key)) {
    const found = choices()[e.key - 1];
    if (found) choose(found[0]);
    return true;
  }
  if (e.key === "Enter") {
    if (document.activeElement?.closest?.("button, a, input")) return false;
    confirmGuess();
    return true;
  }
  if (e.key === "x") {
    skip();
    return true;
  }
  if (e.key === "l" && current !== null) {
    openLook(current);
    return true;
  }
  if (e.key === "/") {
    root.querySelector(".find")?.focus();
    return true;
  }
  if (e.key === "ArrowRight") {
    advance();
    return true;
  }
  if (e.key === "ArrowLeft") {
    if (trail.length) {
      show(trail.pop());
      render();
      say(imageName(current));
    }
    return true;
  }
  return false;
}
