// The classes: typed at the beginning, changed later. One a line; a class keeps its labels under a new name.
import {dialog, h, plural} from "./dom.js";
import {post, refresh, store} from "./store.js";

function form(done) {
  const {classes, template, version, counts} = store.state;
  const rows = h("div", {class: "class-rows"});
  const add = (id, name = "") => {
    const input = h("input", {
      value: name,
      "aria-label": "Class name",
      maxlength: 200,
      autocomplete: "off",
      spellcheck: "false",
      placeholder: "a class, as you would say it",
      onkeydown: e => {
        if (e.key === "Enter") {
          e.preventDefault(); // the browser would submit the form as well
          if (e.ctrlKey) row.closest("form").requestSubmit();
          else (row.nextElementSibling?.querySelector("input") ?? add(null)).focus();
        }
        if (e.key === "Backspace" && !input.value && rows.children.length > 1) {
          e.preventDefault();
          const before = row.previousElementSibling;
          row.remove();
          before?.querySelector("input").focus();
        }
      },
      onpaste: e => {
        const lines = e.clipboardData
          .getData("text")
          .split(/\r?\n/)
          .map(line => line.trim())
          .filter(Boolean);
        if (lines.length > 1) {
          e.preventDefault();
          input.value = lines[0];
          lines
            .slice(1)
            .reduce((_, line) => add(null, line), null)
            .focus();
        }
      },
    });
    input.dataset.id = id ?? "";
    const count = counts[id] ?? 0;
    const row = h(
      "div",
      {class: "class-row"},
      input,
      count > 0 && h("span", {class: "soft"}, plural(count, "label")),
      h(
        "button",
        {type: "button", class: "plain", "aria-label": `Remove class ${name}`, onclick: () => row.remove()},
        "✕",
      ),
    );
    rows.append(row);
    return input;
  };
  classes.forEach(([id, name]) => add(id, name));
  if (!classes.length) {
    add(null);
    add(null);
  }
  const prompt = h("input", {value: template, spellcheck: "false", autocomplete: "off"});
  const error = h("p", {class: "error", role: "alert"});
  let saving = false;
  const save = async e => {
    e.preventDefault();
    if (saving) return;
    const given = [...rows.querySelectorAll("input")]
      .filter(input => input.value.trim())
      .map(input => [input.dataset.id === "" ? null : Number(input.dataset.id), input.value.trim()]);
    const gone = classes.filter(([id]) => (counts[id] ?? 0) && !given.some(([other]) => other === id));
    if (
      gone.length &&
      !confirm(`${gone.map(([, name]) => name).join(", ")}: leave out with all labels? They stay in the log.`)
    )
      return;
    saving = true;
    try {
      await post("classes", {classes: given, template: prompt.value, version});
      await refresh();
      done();
    } catch (problem) {
      error.textContent = problem.message;
    }
    saving = false;
  };
  return h(
    "form",
    {class: "classes", onsubmit: save},
    rows,
    h(
      "div",
      {class: "row"},
      h("button", {type: "button", onclick: () => add(null).focus()}, "+ Class"),
      h("span", {class: "soft"}, "Enter adds one, Ctrl Enter is done; a pasted list becomes many."),
    ),
    h(
      "label",
      {class: "field"},
      h("span", {}, "Prompt"),
      prompt,
      h("small", {class: "soft"}, "{} is the class name; say what all pictures have in common."),
    ),
    error,
    h("div", {class: "row end"}, h("button", {class: "primary"}, classes.length ? "Save" : "Start labelling")),
  );
}

export function setup(main, done) {
  main.replaceChildren(
    h(
      "section",
      {class: "welcome"},
      h("h1", {}, "What do your images show?"),
      h(
        "p",
        {class: "soft"},
        `${plural(store.state.images, "image")} in ${store.state.project}. Name the classes; CLIP guesses at once, and every label you give makes the guesses better.`,
      ),
      form(done),
    ),
  );
  main.querySelector(".class-row input").focus();
}
export function editClasses() {
  const box = dialog(
    "Classes",
    form(() => box.close()),
  );
}
