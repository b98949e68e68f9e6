// Many images at once: those of one guess are confirmed in one stroke, and what is wrong among them gets its class by a
// key. Only what is to be seen is in the page.
import {dot, h, number, percent, plural, toast} from "./dom.js";
import {NONE, SKIPPED, className, guessOf, imageName, label, store, thumbnail, undo} from "./store.js";
import {openLook} from "./look.js";

const GAP = 8,
  SURE = 128,
  FIRST = 24,
  KEYS = 9;
let filter = "",
  list = [],
  selected = new Set(),
  active = 0,
  columns = 1,
  side = 120,
  tiles = new Map();
let root,
  box,
  space,
  bar,
  pick,
  seen = "",
  top = [],
  asked = -1,
  drawn = 0,
  filling = 0,
  at = 0;

const kind = () => filter.split(":")[0],
  of = () => Number(filter.split(":")[1]);
const TESTS = {
  guess: place => store.label[place] === NONE && store.guess[place] === of(),
  label: place => store.label[place] === of(),
  open: place => store.label[place] === NONE,
  skipped: place => store.label[place] === SKIPPED,
  all: () => true,
};
// Images that it is sure of come in no order: the surest of all are much alike, and teach little.
const sure = place => store.sure[place] >= SURE,
  mixed = place => Math.imul(place, 0x9e3779b1) >>> 0;
const before = (a, b) => sure(b) - sure(a) || (sure(a) ? mixed(a) - mixed(b) : store.sure[b] - store.sure[a]);
function rebuild() {
  const test = TESTS[kind()];
  list = [];
  for (let place = 0; place < store.names.length; place++) if (test(place)) list.push(place);
  if (kind() === "guess") list.sort(before);
  selected = new Set(kind() === "guess" ? list.slice(0, FIRST).filter(sure) : []);
  active = Math.min(active, Math.max(0, list.length - 1));
}
function counts() {
  const found = new Map();
  for (let place = 0; place < store.names.length; place++)
    if (store.label[place] === NONE && store.guess[place] >= 0)
      found.set(store.guess[place], (found.get(store.guess[place]) ?? 0) + 1);
  return found;
}
function options() {
  const count = counts(),
    tally = store.state.counts;
  const one = (value, text) => h("option", {value, selected: value === filter}, text);
  const guesses = [...store.classes.keys()].filter(id => count.get(id)).sort((a, b) => count.get(b) - count.get(a));
  if (!filter) filter = guesses.length ? `guess:${guesses[0]}` : "open";
  pick.replaceChildren(
    h(
      "optgroup",
      {label: "Guessed, not labelled"},
      guesses.map(id => one(`guess:${id}`, `${className(id)} (${number(count.get(id))})`)),
      filter.startsWith("guess") && !count.get(of()) && one(filter, `${className(of())} (0)`),
    ),
    h(
      "optgroup",
      {label: "Labelled"},
      [...store.classes.keys()]
        .filter(id => tally[id])
        .map(id => one(`label:${id}`, `${className(id)} (${number(tally[id])})`)),
      one("skipped", `skipped (${number(tally[SKIPPED] ?? 0)})`),
    ),
    h(
      "optgroup",
      {label: "Everything"},
      one("open", "without a label"),
      one("all", `all images (${number(store.names.length)})`),
    ),
  );
}
export function mount(main) {
  tiles = new Map();
  pick = h("select", {
    "aria-label": "Which images",
    onchange: () => {
      filter = pick.value;
      active = 0;
      rebuild();
      box.scrollTop = 0;
      draw();
      box.focus();
    },
  });
  bar = h("div", {class: "gridbar"});
  space = h("div", {class: "space"});
  box = h(
    "div",
    {
      class: "gridbox",
      tabindex: 0,
      role: "listbox",
      "aria-multiselectable": "true",
      "aria-label": "Images",
      onscroll: schedule,
      onclick: e => {
        const at = e.target.closest(".tile");
        if (at) {
          active = list.indexOf(Number(at.dataset.place));
          toggle();
        }
      },
      ondblclick: e => {
        const at = e.target.closest(".tile");
        if (at) openLook(Number(at.dataset.place));
      },
    },
    space,
  );
  root = h("section", {class: "gridview"}, h("div", {class: "gridtop"}, pick, bar), box);
  main.replaceChildren(root);
  options();
  rebuild();
  new ResizeObserver(schedule).observe(box);
  draw();
  box.focus();
}
export function update() {
  if (!root?.isConnected) return;
  const now = `${store.state.version} ${store.state.guesses} ${store.state.classes}`;
  if (now === seen) return;
  seen = now;
  options();
  // Images stay where they are under the eye: those that got a label elsewhere go, new ones come last.
  const test = TESTS[kind()],
    count = list.length;
  list = list.filter(place => test(place) || (kind() === "guess" && store.label[place] === NONE));
  const there = new Set(list);
  selected = new Set([...selected].filter(place => there.has(place)));
  if (!list.length || count === 0) rebuild();
  else
    for (let place = 0; place < store.names.length; place++) if (!there.has(place) && test(place)) list.push(place);
  draw();
}
function schedule() {
  if (!drawn)
    drawn = requestAnimationFrame(() => {
      drawn = 0;
      draw();
    });
}
function draw() {
  if (!box?.isConnected) return;
  const width = box.clientWidth - 2 * GAP,
    wanted = width < 500 ? 92 : 128;
  columns = Math.max(2, Math.floor((width + GAP) / (wanted + GAP)));
  side = (width - GAP * (columns - 1)) / columns;
  const pitch = side + GAP,
    rows = Math.ceil(list.length / columns);
  space.style.height = `${rows * pitch + GAP}px`;
  const first = Math.max(0, Math.floor(box.scrollTop / pitch) - 2),
    last = Math.min(rows, Math.ceil((box.scrollTop + box.clientHeight) / pitch) + 2);
  const keep = new Set();
  for (let i = first * columns; i < Math.min(last * columns, list.length); i++) {
    const place = list[i];
    keep.add(place);
    let tile = tiles.get(place);
    if (!tile) {
      tile = h(
        "div",
        {class: "tile", role: "option", id: `tile-${place}`, "data-place": place, title: imageName(place)},
        h("img", {
          alt: imageName(place),
          onload: e => e.target.classList.toggle("small", e.target.naturalWidth < 100),
        }),
        h("span", {class: "mark", "aria-hidden": "true"}, "✓"),
        h("span", {class: "tag"}),
      );
      tiles.set(place, tile);
      space.append(tile);
    }
    tile.style.transform = `translate(${GAP + (i % columns) * pitch}px, ${GAP + Math.floor(i / columns) * pitch}px)`;
    tile.style.width = tile.style.height = `${side}px`;
    tile.setAttribute("aria-selected", String(selected.has(place)));
    tile.setAttribute("aria-posinset", i + 1);
    tile.setAttribute("aria-setsize", list.length);
    tile.classList.toggle("active", i === active);
    const value = store.label[place],
      tag = tile.querySelector(".tag");
    tag.textContent =
      value === SKIPPED
        ? "skipped"
        : value !== NONE
          ? className(value)
          : store.guess[place] >= 0
            ? kind() === "guess"
              ? percent(store.sure[place] / 2.55)
              : `${className(store.guess[place])}?`
            : "";
  }
  for (const [place, tile] of tiles)
    if (!keep.has(place)) {
      tile.querySelector("img").removeAttribute("src"); // what nobody sees any more need not be loaded
      tile.remove();
      tiles.delete(place);
    }
  // Pictures of what flies by are not asked for.
  clearTimeout(filling);
  const calm = Math.abs(box.scrollTop - at) < box.clientHeight;
  at = box.scrollTop;
  if (calm) fill();
  else filling = setTimeout(fill, 80);
  box.setAttribute("aria-activedescendant", list.length ? `tile-${list[active]}` : "");
  box.classList.toggle("picking", kind() === "guess" || selected.size > 0);
  space.classList.toggle("nothing", !list.length);
  ask();
  const can = kind() === "guess" && selected.size;
  bar.replaceChildren(
    h(
      "button",
      {type: "button", class: "primary", disabled: !can, onclick: confirmAll},
      h("kbd", {}, "↵"),
      " ",
      can
        ? h("span", {}, `${number(selected.size)} × `, dot(of()), className(of()))
        : plural(selected.size, "image").concat(" selected"),
    ),
    h(
      "button",
      {
        type: "button",
        onclick: () => {
          selectAll();
          box.focus();
        },
      },
      h("kbd", {}, "a"),
      selected.size ? " None" : " All shown",
    ),
    h(
      "span",
      {class: "soft wide"},
      kind() === "guess"
        ? ["This one is ", choices().map((id, i) => [h("kbd", {}, i + 1), ` ${className(id)} `])]
        : "Space or click takes an image in or out; a number gives those selected a class.",
    ),
  );
}
function fill() {
  for (const [place, tile] of tiles) {
    const image = tile.querySelector("img");
    if (!image.hasAttribute("src")) image.src = thumbnail(place);
  }
}
function toggle() {
  const place = list[active];
  if (place === undefined) return;
  if (!selected.delete(place)) selected.add(place);
  draw();
}
function selectAll() {
  const first = Math.floor(box.scrollTop / (side + GAP)) * columns,
    count = columns * Math.ceil(box.clientHeight / (side + GAP));
  selected = selected.size ? new Set() : new Set(list.slice(first, first + count));
  draw();
}
// What the keys give the image under the cursor: all classes, or of many the most probable.
const choices = () => (store.classes.size > KEYS ? top : [...store.classes.keys()]);
function ask() {
  const place = list[active];
  if (kind() !== "guess" || store.classes.size <= KEYS || place === undefined || place === asked) return;
  asked = place;
  top = [];
  guessOf(place).then(
    found => {
      if (asked === place) {
        top = found.top.map(([id]) => id);
        draw();
      }
    },
    () => {},
  );
}
function correct(value) {
  const place = list[active];
  if (place === undefined || value === undefined) return;
  label([place], value);
  selected.delete(place);
  list = list.filter(other => other !== place); // it may have gone already, with the news of that label
  active = Math.min(active, Math.max(0, list.length - 1));
  draw();
}
function give(value) {
  const places = [...selected];
  if (!places.length) return;
  label(places, value);
  toast(`${plural(places.length, "image")} → ${value === SKIPPED ? "skipped" : className(value)}`, {
    action: "Undo (z)",
    act: undo,
  });
  box.scrollTop = 0;
  active = 0;
  rebuild();
  if (!list.length && kind() === "guess") {
    filter = "";
    options();
    rebuild();
  }
  draw();
}
function confirmAll() {
  if (kind() === "guess") give(of());
  box.focus();
}
function move(by, extend) {
  if (extend && list[active] !== undefined) selected.add(list[active]);
  active = Math.max(0, Math.min(list.length - 1, active + by));
  if (extend && list[active] !== undefined) selected.add(list[active]);
  const top = Math.floor(active / columns) * (side + GAP);
  if (top < box.scrollTop) box.scrollTop = top;
  else if (top + side + 2 * GAP > box.scrollTop + box.clientHeight)
    box.scrollTop = top + side + 2 * GAP - box.clientHeight;
  draw();
}
store.addEventListener("undone", e => {
  if (root?.isConnected) {
    rebuild();
    selected = new Set(e.detail.filter(place => list.includes(place)));
    draw();
  }
});

export function key(e) {
  if (document.activeElement === pick && e.key !== "Escape") return false;
  const page = columns * Math.max(1, Math.floor(box.clientHeight / (side + GAP)));
  const steps = {
    ArrowRight: 1,
    ArrowLeft: -1,
    ArrowDown: columns,
    ArrowUp: -columns,
    PageDown: page,
    PageUp: -page,
    Home: -list.length,
    End: list.length,
  };
  if (e.key in steps) {
    move(steps[e.key], e.shiftKey);
    return true;
  }
  if (e.key === " ") {
    if (document.activeElement?.tagName === "BUTTON") return false;
    toggle();
    return true;
  }
  if (e.key === "Enter") {
    if (document.activeElement?.tagName === "BUTTON") return false;
    confirmAll();
    return true;
  }
  if (e.key === "a") {
    selectAll();
    return true;
  }
  if (e.key === "Escape") {
    selected = new Set();
    draw();
    box.focus();
    return true;
  }
  if (e.key === "x") {
    give(SKIPPED);
    return true;
  }
  if (e.key === "l" && list[active] !== undefined) {
    openLook(list[active]);
    return true;
  }
  if (/^[1-9]$/.test(e.key)) {
    if (kind() === "guess") correct(choices()[e.key - 1]);
    else if ([...store.classes.keys()][e.key - 1] !== undefined) give([...store.classes.keys()][e.key - 1]);
    return true;
  }
  if (e.key === "f" || e.key === "/") {
    pick.focus();
    return true;
  }
  return false;
}
