// The page: views, keys, what is going on.
import {dialog, h, number, percent, plural, toast} from "./dom.js";
import {begin, store, undo} from "./store.js";
import {setup} from "./classes.js";
import * as labelView from "./label.js";
import * as gridView from "./grid.js";
import * as checkView from "./check.js";
import * as trainView from "./train.js";

const VIEWS = {
  label: ["Label", labelView],
  grid: ["Grid", gridView],
  check: ["Check", checkView],
  train: ["Adapter", trainView],
};
const main = document.getElementById("main"),
  tabs = document.getElementById("tabs");
let shown = "",
  told = "",
  tabbed = "";

function open(name) {
  shown = name;
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  VIEWS[name][1].mount(main);
  document.title = `${VIEWS[name][0]} · ${store.state.project} · perlclip studio`;
  drawTabs();
}
function drawTabs() {
  const doubts = (store.check.suspects ?? []).length;
  if (tabbed === `${shown} ${doubts}`) return;
  tabbed = `${shown} ${doubts}`;
  tabs.replaceChildren(
    ...Object.entries(VIEWS).map(([name, [title]], i) =>
      h(
        "a",
        {href: `#${name}`, "aria-current": shown === name ? "page" : undefined, title: `${title} (g ${i + 1})`},
        title,
        name === "check" && doubts > 0 && h("span", {class: "badge"}, doubts),
      ),
    ),
  );
}
addEventListener("hashchange", () => {
  const name = location.hash.slice(1);
  if (VIEWS[name] && store.state?.classes.length) open(name);
});

function drawStatus() {
  const {status, looked, unreadable, images} = store.state,
    box = document.getElementById("status");
  const last = store.history.filter(row => row.accuracy !== null).at(-1),
    readers = unreadable ? `, ${plural(unreadable, "image")} cannot be read` : "";
  if (status.task) {
    box.replaceChildren(
      h(
        "span",
        {},
        status.title,
        status.total ? h("span", {class: "soft"}, ` ${number(status.done)}/${number(status.total)}`) : "",
      ),
      h("progress", {
        max: status.total || 1,
        value: status.total ? status.done : undefined,
        "aria-label": status.title,
      }),
    );
  } else
    box.replaceChildren(
      h(
        "span",
        {class: "soft"},
        status.error ||
          (last
            ? `${last.kind === "perl" ? "PERL" : "quick head"}: ${percent(last.accuracy)} on ${last.held} held out${readers}`
            : `${number(looked)} of ${plural(images, "image")} seen${readers}`),
      ),
    );
  if (status.error && status.error !== told) toast(status.error, {bad: true, seconds: 12});
  told = status.error;
}
store.addEventListener("change", () => {
  document.getElementById("project").textContent = store.state.project;
  drawStatus();
  if (!store.state.classes.length) {
    if (shown !== "setup") {
      shown = "setup";
      tabbed = "";
      tabs.replaceChildren();
      setup(main, () => open("label"));
    }
    return;
  }
  const name = location.hash.slice(1);
  if (!VIEWS[shown]) open(VIEWS[name] ? name : "label");
  else {
    drawTabs();
    VIEWS[shown][1].update();
  }
});

const HELP = [
  ["1 … 9", "give the class with that number; in a grid of guesses to the image under the cursor"],
  ["Enter", "confirm the guess; in the grid, of all that are selected"],
  ["x", "skip"],
  ["z", "take the last stroke back"],
  ["← →", "the image before, the next one"],
  ["l", "look inside: evidence and steps"],
  ["/", "find a class, or which images"],
  ["Space, a", "in the grid: take one in or out, all that are shown"],
  ["Shift ← → ↑ ↓", "in the grid: select on the way"],
  ["t, e", "in Adapter: train PERL, export"],
  ["g then 1 … 4", "Label, Grid, Check, Adapter"],
  ["?", "this help"],
];
const help = () =>
  document.querySelector("dialog[open]") ??
  dialog(
    "Keys",
    h(
      "dl",
      {class: "keys"},
      HELP.map(([key, what]) => [
        h(
          "dt",
          {},
          key.split(/(, | then | … )/).map(part => (/, | then | … /.test(part) ? part : h("kbd", {}, part))),
        ),
        h("dd", {}, what),
      ]),
    ),
  );
document.getElementById("help").addEventListener("click", help);

// What a key means, also with caps lock and where digits and letters are other signs, as on French or Russian keyboards.
const meant = ({key, code = "", shiftKey}) => {
  const known = key.length > 1 || /[a-z1-9/? ]/.test(key),
    [, sign] = /^(?:Key|Digit)(.)$/.exec(code) ?? [];
  return known || shiftKey || !sign ? key : sign.toLowerCase();
};
const AGAIN = /^(Arrow|Page|Home|End)/; // a key that is held down moves on; it labels one image, not all of them

let went = -Infinity;
addEventListener("keydown", e => {
  if (e.ctrlKey || e.metaKey || e.altKey || e.isComposing || document.querySelector("dialog[open]")) return;
  const typing = e.target.closest?.("input:not([type=checkbox]):not([type=range]), textarea, select");
  if (typing || !VIEWS[shown]) return;
  if (e.repeat && !AGAIN.test(e.key)) {
    if (e.key !== "Tab") e.preventDefault();
    return;
  }
  const go = e.timeStamp - went < 1200,
    key = meant(e);
  went = -Infinity;
  if (go && /^[1-4]$/.test(key)) {
    open(Object.keys(VIEWS)[key - 1]);
    e.preventDefault();
  } else if (key === "g") went = e.timeStamp;
  else if (key === "?") {
    help();
    e.preventDefault();
  } else if (key === "z") {
    undo();
    e.preventDefault();
  } else if (VIEWS[shown][1].key({key, shiftKey: e.shiftKey})) e.preventDefault();
});
begin();
