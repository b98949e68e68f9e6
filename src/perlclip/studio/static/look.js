// One image in depth: what speaks for its answer, step by step.
import {dialog, dot, h, percent} from "./dom.js";
import {NONE, SKIPPED, className, imageName, label, look, store, view} from "./store.js";

const WIDE = 300,
  HIGH = 130,
  PAD = 26;

export async function openLook(place) {
  const body = h("div", {class: "look"}, h("p", {class: "soft"}, "Looking …"));
  const box = dialog(imageName(place), body);
  try {
    const found = await look(place);
    if (box.isConnected) body.replaceChildren(...content(place, found, box));
    body.querySelector("[autofocus]")?.focus();
  } catch (error) {
    body.replaceChildren(h("p", {class: "error"}, error.message));
  }
}
function content(place, {top, maps, held}, box) {
  const given = store.label[place];
  const facts = h(
    "p",
    {class: "soft"},
    given === SKIPPED
      ? "Skipped."
      : given === NONE
        ? "No label yet."
        : h("span", {}, "Label: ", dot(given), className(given), ". "),
    held && " Held out: its label is for measuring, not for training.",
  );
  const guesses = h(
    "ul",
    {class: "bars"},
    top.slice(0, 5).map(([id, p]) =>
      h(
        "li",
        {vars: {"--p": `${100 * p}%`}},
        h(
          "button",
          {
            type: "button",
            class: "choice",
            title: "Label it so",
            onclick: () => {
              label([place], id);
              box.close();
            },
          },
          dot(id),
          h("span", {class: "name"}, className(id)),
          h("span", {class: "soft"}, percent(100 * p)),
        ),
      ),
    ),
  );
  if (!maps)
    return [
      h(
        "div",
        {class: "pair"},
        h("img", {class: "plainview", src: view(place), alt: imageName(place)}),
        h(
          "div",
          {},
          facts,
          guesses,
          h("p", {class: "soft"}, "Evidence maps and steps are PERL's: they are here once it has been trained."),
        ),
      ),
    ];
  const last = maps.answers.length - 1;
  const overs = maps.titles.map(() => h("img", {class: "over", alt: ""}));
  const panes = overs.map((over, m) =>
    h(
      "figure",
      {class: "pane"},
      h(
        "div",
        {class: "frame"},
        h("img", {src: maps.picture, alt: "the image as the model sees it", class: maps.small ? "small" : ""}),
        over,
      ),
      h("figcaption", {}, h("b", {}, maps.titles[m][0]), h("span", {class: "soft"}, ` ${maps.titles[m][1]}`)),
    ),
  );
  const answer = h("output", {});
  const x = k => PAD + (WIDE - PAD - 8) * (last ? k / last : 0),
    y = p => 8 + (HIGH - 26) * (1 - p);
  const marker = h("line", {y1: 8, y2: HIGH - 18, class: "marker"});
  const chart = h(
    "svg",
    {viewBox: `0 0 ${WIDE} ${HIGH}`, class: "chart", role: "img", "aria-label": "Confidence by step"},
    [0, 0.5, 1].map(p =>
      h(
        "g",
        {},
        h("line", {x1: PAD, x2: WIDE - 8, y1: y(p), y2: y(p), class: "rule"}),
        h("text", {x: PAD - 4, y: y(p) + 3, class: "tick end"}, p),
      ),
    ),
    [0, 1].map(m =>
      h("polyline", {class: `line c${m}`, points: maps.confidence.map((row, k) => `${x(k)},${y(row[m])}`).join(" ")}),
    ),
    marker,
    maps.answers.map((_, k) => h("text", {x: x(k), y: HIGH - 4, class: "tick"}, k)),
  );
  const slider = h("input", {
    type: "range",
    min: 0,
    max: last,
    value: last,
    "aria-label": "Step",
    autofocus: true,
    oninput: () => step(Number(slider.value)),
  });
  function step(k) {
    overs.forEach((over, m) => {
      over.src = maps.data.maps[m][k];
    });
    marker.setAttribute("x1", x(k));
    marker.setAttribute("x2", x(k));
    answer.value = `After step ${k}: ${maps.answers[k]}`;
  }
  step(last);
  return [
    h("div", {class: "panes"}, panes),
    h(
      "div",
      {class: "pair"},
      h(
        "div",
        {},
        h("label", {class: "field"}, h("span", {}, "Step"), slider),
        answer,
        chart,
        h(
          "p",
          {class: "legend"},
          h("i", {class: "key c0"}),
          maps.classes[0],
          h("i", {class: "key c1"}),
          maps.classes[1],
        ),
      ),
      h("div", {}, facts, guesses),
    ),
    h("p", {class: "soft"}, "Orange speaks for the class, blue against it. Step 0 is zero-shot CLIP."),
  ];
}
