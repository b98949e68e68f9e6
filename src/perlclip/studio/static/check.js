// Labels that are probably wrong, and classes that are taken for each other.
import {dot, h, percent, plural} from "./dom.js";
import {className, imageName, label, store, thumbnail} from "./store.js";
import {openLook} from "./look.js";

const kept = new Set(JSON.parse(sessionStorage.kept || "[]")); // labels that somebody has looked at and stands by
let root = null,
  seen = "";

const mark = one => `${one.place} ${one.label}`;
function keep(one) {
  kept.add(mark(one));
  sessionStorage.kept = JSON.stringify([...kept]);
  seen = "";
  update();
}
function picture(place) {
  return h(
    "button",
    {type: "button", class: "thumb", "aria-label": `Look inside ${imageName(place)}`, onclick: () => openLook(place)},
    h("img", {
      src: thumbnail(place),
      alt: imageName(place),
      loading: "lazy",
      onload: e => e.target.classList.toggle("small", e.target.naturalWidth < 100),
    }),
  );
}
export function mount(main) {
  root = h("section", {class: "checking"});
  main.replaceChildren(root);
  seen = "";
  update();
}
export function update() {
  if (!root?.isConnected) return;
  const {check} = store,
    now = JSON.stringify([check, store.state.classes, kept.size]);
  if (now === seen) return;
  seen = now;
  const suspects = (check.suspects ?? []).filter(
    one => !kept.has(mark(one)) && store.label[one.place] === one.label && store.classes.has(one.likely),
  );
  if (!check.labels || check.labels < check.needed) {
    root.replaceChildren(
      h(
        "div",
        {class: "empty"},
        h("h2", {}, "Nothing to check yet"),
        h(
          "p",
          {class: "soft"},
          `After ${check.needed ?? 8} labels of two classes, each label is asked about without itself; what seems wrong is shown here.`,
        ),
      ),
    );
    return;
  }
  root.replaceChildren(
    h("h2", {}, "Probably wrong"),
    suspects.length
      ? h(
          "ul",
          {class: "cards"},
          suspects.map(one =>
            h(
              "li",
              {class: "card"},
              picture(one.place),
              h(
                "div",
                {},
                h("p", {class: "file"}, imageName(one.place)),
                h(
                  "p",
                  {},
                  "You said ",
                  dot(one.label),
                  h("b", {}, className(one.label)),
                  "; the others say ",
                  dot(one.likely),
                  h("b", {}, className(one.likely)),
                  ".",
                ),
                h("p", {class: "soft"}, `a wrong label with a probability of ${percent(100 * one.wrong)}`),
                h(
                  "div",
                  {class: "row"},
                  h(
                    "button",
                    {
                      type: "button",
                      class: "primary",
                      onclick: () => {
                        seen = "";
                        label([one.place], one.likely);
                      },
                    },
                    `→ ${className(one.likely)}`,
                  ),
                  h("button", {type: "button", onclick: () => keep(one)}, "It is right"),
                ),
              ),
            ),
          ),
        )
      : h("p", {class: "soft"}, `None of ${plural(check.labels, "label")} stands out.`),
    h("h2", {}, "Taken for each other"),
    h(
      "p",
      {class: "soft"},
      `Each label without itself: ${percent(check.right)} of ${plural(check.labels, "label")} would have been answered so.`,
    ),
    check.confused?.length
      ? h(
          "ul",
          {class: "pairs"},
          check.confused.map(pair =>
            h(
              "li",
              {},
              h(
                "p",
                {},
                dot(pair.label),
                h("b", {}, className(pair.label)),
                " taken for ",
                dot(pair.answer),
                h("b", {}, className(pair.answer)),
                h("span", {class: "soft"}, ` ${plural(pair.places.length, "image")}`),
              ),
              h("div", {class: "strip"}, pair.places.slice(0, 12).map(picture)),
            ),
          ),
        )
      : h("p", {class: "soft"}, "No class is mixed up with another."),
  );
}
export const key = () => false;
