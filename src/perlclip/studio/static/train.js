// How good it is by now, and taking it home.
import {dot, h, number, percent, plural} from "./dom.js";
import {className, post, refresh, store} from "./store.js";
import {editClasses} from "./classes.js";

const HIGH = 260,
  LEFT = 44,
  RIGHT = 14,
  TOP = 14,
  BOTTOM = 34;
let root = null,
  seen = "",
  all = true;

const ask = (what, more = {}) => post("ask", {what, ...more}).then(refresh);
export function mount(main) {
  root = h("section", {class: "training"});
  main.replaceChildren(root);
  seen = "";
  update();
}
export function update() {
  if (!root?.isConnected) return;
  const {status, exported, classes, counts, version, guesses} = store.state;
  const now = JSON.stringify([status, exported, classes, counts, version, guesses, store.history.length]);
  if (now === seen) return;
  seen = now;
  const focus = document.activeElement?.dataset?.keep,
    busy = status.task === "train" || status.task === "export";
  const perl = store.history.filter(row => row.kind === "perl").at(-1),
    quick = store.history.filter(row => row.kind === "quick").at(-1);
  root.replaceChildren(
    h(
      "div",
      {class: "panel"},
      h("h2", {}, "Accuracy on labels held out"),
      curve(store.history),
      h(
        "div",
        {class: "figures"},
        figure("zero-shot", quick?.zero_shot),
        figure("quick head", quick?.accuracy),
        figure("PERL", perl?.accuracy),
        h(
          "p",
          {class: "soft"},
          quick?.held
            ? `One image in five is only tested on: ${plural(quick.held, "label")} so far. With few of them the curve jumps; the band says how sure it is (95 %).`
            : "One image in five is only tested on; none of those has a label yet.",
        ),
      ),
    ),
    h(
      "div",
      {class: "panel"},
      h("h2", {}, "Training"),
      h(
        "p",
        {},
        "A quick head is fitted after every label. PERL follows after every ",
        h("b", {}, plural(store.state.every, "label")),
        perl ? ` (last: ${perl.seconds} s, ${plural(perl.labels, "label")}).` : ".",
      ),
      busy
        ? h(
            "div",
            {},
            h("p", {}, status.title, h("span", {class: "soft"}, ` ${status.note}`)),
            h("progress", {max: status.total || 1, value: status.done, "aria-label": status.title}),
            h(
              "div",
              {class: "row"},
              h("button", {type: "button", "data-keep": "stop", onclick: () => ask("stop")}, "Stop"),
            ),
          )
        : h(
            "div",
            {class: "row"},
            h(
              "button",
              {type: "button", "data-keep": "train", onclick: () => ask("train")},
              h("kbd", {}, "t"),
              " Train PERL now",
            ),
          ),
      status.error && h("p", {class: "error", role: "alert"}, status.error),
    ),
    h(
      "div",
      {class: "panel"},
      h("h2", {}, "Take it home"),
      h("p", {class: "soft"}, `Adapter, labels (CSV) and a report, in ${store.state.out}`),
      h(
        "label",
        {class: "check"},
        h("input", {
          type: "checkbox",
          checked: all,
          "data-keep": "all",
          onchange: e => {
            all = e.target.checked;
          },
        }),
        "train PERL once more first, on all labels",
      ),
      h(
        "div",
        {class: "row"},
        h(
          "button",
          {
            type: "button",
            class: "primary",
            disabled: busy,
            "data-keep": "export",
            onclick: () => ask("export", {all}),
          },
          h("kbd", {}, "e"),
          " Export",
        ),
      ),
      exported &&
        h(
          "p",
          {class: "done", role: "status"},
          `Written: ${exported.files.join(", ")} (${exported.method}). `,
          h("a", {href: "/api/export.zip", download: "perlclip-export.zip"}, "Download all"),
        ),
    ),
    h(
      "div",
      {class: "panel"},
      h("h2", {}, "Classes"),
      h(
        "ul",
        {class: "bars"},
        classes.map(([id]) =>
          h(
            "li",
            {vars: {"--p": `${(100 * (counts[id] ?? 0)) / Math.max(1, ...classes.map(([c]) => counts[c] ?? 0))}%`}},
            h(
              "div",
              {class: "choice"},
              dot(id),
              h("span", {class: "name"}, className(id)),
              h("span", {class: "soft"}, number(counts[id] ?? 0)),
            ),
          ),
        ),
      ),
      h(
        "div",
        {class: "row"},
        h("button", {type: "button", "data-keep": "classes", onclick: editClasses}, "Change classes"),
      ),
    ),
  );
  if (focus) root.querySelector(`[data-keep="${CSS.escape(focus)}"]`)?.focus();
}
const figure = (name, value) =>
  h("div", {class: "figure"}, h("b", {}, percent(value)), h("span", {class: "soft"}, name));

// Wilson's interval: what so many images can say.
function interval(share, count) {
  const z = 1.96,
    middle = (share + (z * z) / (2 * count)) / (1 + (z * z) / count);
  const half = (z * Math.sqrt((share * (1 - share)) / count + (z * z) / (4 * count * count))) / (1 + (z * z) / count);
  return [Math.max(0, middle - half), Math.min(1, middle + half)];
}
function curve(history) {
  const WIDE = root.clientWidth < 600 ? 380 : 640,
    now = Math.max(0, ...history.slice(-1).map(row => row.labels));
  // Strokes that were taken back have left their points behind: of each number of labels the last one counts.
  const last = new Map(history.map((row, i) => [`${row.kind} ${row.labels}`, i]));
  const rows = history
      .filter((row, i) => row.accuracy !== null && row.labels <= now && last.get(`${row.kind} ${row.labels}`) === i)
      .sort((a, b) => a.labels - b.labels),
    quick = rows.filter(row => row.kind === "quick"),
    perl = rows.filter(row => row.kind === "perl");
  if (!rows.length) return h("p", {class: "empty small"}, "The curve begins with the first label that is held out.");
  const most = Math.max(10, ...rows.map(row => row.labels));
  const x = labels => LEFT + ((WIDE - LEFT - RIGHT) * labels) / most,
    y = share => TOP + (HIGH - TOP - BOTTOM) * (1 - share);
  const points = list => list.map(row => `${x(row.labels).toFixed(1)},${y(row.accuracy / 100).toFixed(1)}`).join(" ");
  const bands = quick.map(row => [x(row.labels).toFixed(1), ...interval(row.accuracy / 100, row.held).map(y)]);
  const band = [
    ...bands.map(([at, low]) => `${at},${low.toFixed(1)}`),
    ...bands.reverse().map(([at, , high]) => `${at},${high.toFixed(1)}`),
  ].join(" ");
  const zero = rows.at(-1).zero_shot;
  const said = `Held-out accuracy after ${rows.at(-1).labels} labels: ${percent(rows.at(-1).accuracy)}; zero-shot ${percent(zero)}`;
  return h(
    "svg",
    {viewBox: `0 0 ${WIDE} ${HIGH}`, class: "curve", role: "img", "aria-label": said},
    [0, 0.25, 0.5, 0.75, 1].map(share =>
      h(
        "g",
        {},
        h("line", {x1: LEFT, x2: WIDE - RIGHT, y1: y(share), y2: y(share), class: "rule"}),
        h("text", {x: LEFT - 6, y: y(share) + 4, class: "tick end"}, `${100 * share} %`),
      ),
    ),
    [0, 0.5, 1].map(part => h("text", {x: x(part * most), y: HIGH - 14, class: "tick"}, Math.round(part * most))),
    h("text", {x: (LEFT + WIDE - RIGHT) / 2, y: HIGH - 1, class: "tick"}, "labels"),
    h("polygon", {points: band, class: "band"}),
    zero !== null && h("line", {x1: LEFT, x2: WIDE - RIGHT, y1: y(zero / 100), y2: y(zero / 100), class: "zero"}),
    h("polyline", {points: points(quick), class: "line c0"}),
    h("polyline", {points: points(perl), class: "line c1"}),
    quick.length === 1 && // a line needs two
      quick.map(row => h("circle", {cx: x(row.labels), cy: y(row.accuracy / 100), r: 4.5, class: "only"})),
    perl.map(row => h("circle", {cx: x(row.labels), cy: y(row.accuracy / 100), r: 4.5, class: "point"})),
    [
      ["quick head", "c0"],
      ["PERL", "c1"],
      ["zero-shot", "zero"],
    ].map(([name, kind], i) =>
      h(
        "g",
        {},
        h("line", {
          x1: WIDE - 290 + 98 * i,
          x2: WIDE - 272 + 98 * i,
          y1: HIGH - 48,
          y2: HIGH - 48,
          class: kind === "zero" ? "zero" : `line ${kind}`,
        }),
        h("text", {x: WIDE - 266 + 98 * i, y: HIGH - 44, class: "tick start"}, name),
      ),
    ),
  );
}
export function key(e) {
  if (e.key === "t") {
    ask("train");
    return true;
  }
  if (e.key === "e") {
    ask("export", {all});
    return true;
  }
  return false;
}
