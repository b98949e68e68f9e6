// What the page knows: the server's state, asked for about once a second, and the strokes that are on their way to it.
import {say, toast} from "./dom.js";

export const NONE = -1,
  SKIPPED = -2;
export const store = Object.assign(new EventTarget(), {
  state: null,
  names: [],
  keys: [],
  label: new Int32Array(0),
  guess: new Int32Array(0),
  sure: new Uint8Array(0),
  history: [],
  check: {},
});
const tab = (sessionStorage.tab ||= crypto.randomUUID ? crypto.randomUUID() : String(Math.random()));
const outbox = JSON.parse(sessionStorage.outbox || "[]"); // strokes not yet on disk: a reload sends them again
const FINAL = new Set([400, 404, 409, 413, 422]); // of a stroke that will never be taken; all else may pass
const keepOutbox = () => {
  try {
    sessionStorage.outbox = JSON.stringify(outbox);
  } catch {
    /* there is no room: they are in this page's memory */
  }
};
let sending = false,
  timer = 0,
  strokes = 0,
  had = {};

const changed = () => store.dispatchEvent(new Event("change"));
export const className = id => store.classes.get(id) ?? "?";
export const imageName = place => store.names[place] ?? "";
export const thumbnail = place => `/thumbnail/${place}?${store.keys[place]}`;
export const view = place => `/view/${place}?${store.keys[place]}`;
store.classes = new Map();

async function get(path, kind = "json") {
  const answer = await fetch(path);
  if (!answer.ok) throw await refusal(answer);
  return kind === "json" ? answer.json() : answer.arrayBuffer();
}
async function refusal(answer) {
  let sentence = `the studio answered ${answer.status}`;
  try {
    sentence = (await answer.json()).error || sentence;
  } catch {
    /* not ours */
  }
  return Object.assign(new Error(sentence), {status: answer.status});
}
export async function post(path, body) {
  const answer = await fetch(`/api/${path}`, {
    method: "POST",
    body: JSON.stringify(body),
    headers: {"content-type": "application/json"},
  });
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}
export const look = place => get(`/api/look/${place}`);
export const guessOf = place => get(`/api/guess/${place}`);
const away = yes => {
  document.getElementById("away").hidden = !yes;
};

export async function refresh() {
  clearTimeout(timer);
  try {
    const state = await get("/api/state");
    away(false);
    if (store.state && state.listing !== store.state.listing) return location.reload();
    if (!store.names.length) {
      const images = await get("/api/images");
      Object.assign(store, {names: images.names, keys: images.keys});
    }
    const now = {table: `${state.version} ${state.guesses}`, refits: state.refits};
    store.classes = new Map(state.classes);
    store.state = state;
    if (had.table !== now.table && !outbox.length) {
      const before = strokes,
        [bytes, check] = await Promise.all([get("/api/table", "bytes"), get("/api/check")]);
      const size = store.names.length;
      Object.assign(store, {
        guess: new Int32Array(bytes, 4 * size, size),
        sure: new Uint8Array(bytes, 8 * size),
        check,
      });
      if (before === strokes) {
        // else it does not know of a label that was given meanwhile
        store.label = new Int32Array(bytes, 0, size);
        had.table = now.table;
      }
    }
    if (had.refits !== now.refits) {
      store.history = await get("/api/history");
      had.refits = now.refits;
    }
    changed();
  } catch (error) {
    if (error.status === 401) return void (document.getElementById("main").textContent = error.message);
    away(true);
  }
  timer = setTimeout(refresh, document.hidden ? 5000 : 900);
}
document.addEventListener("visibilitychange", () => document.hidden || refresh());

// One after the other, in order; what the network loses is sent again under the same name and counts once.
async function send() {
  if (sending) return;
  sending = true;
  while (outbox.length) {
    const {path, body, names} = outbox[0];
    try {
      const answer = await post(path, body);
      if (path === "undo") {
        answer.places.forEach((place, i) => {
          store.label[place] = answer.values[i];
        });
        say(answer.places.length ? `Taken back: ${imageName(answer.places[0])}` : "Nothing to take back");
        if (!answer.places.length) toast("There is nothing to take back.");
        else store.dispatchEvent(new CustomEvent("undone", {detail: answer.places}));
      }
    } catch (error) {
      if (!FINAL.has(error.status)) {
        away(true);
        await new Promise(go => setTimeout(go, 1000));
        continue;
      }
      if (error.status === 409 && (await moved(body, names))) continue;
      toast(error.message, {bad: true, seconds: 12});
      had.table = "";
    }
    away(false);
    outbox.shift();
    keepOutbox();
  }
  sending = false;
  refresh();
}
// Labels given while the studio was away, to a folder that has changed meanwhile: images go by their names.
async function moved(body, names) {
  try {
    const images = await get("/api/images");
    if (images.listing === body.listing || (body.places && !names)) return false;
    const place = new Map(images.names.map((name, i) => [name, i]));
    if (names) body.places = names.map(name => place.get(name)).filter(at => at !== undefined);
    body.listing = images.listing;
    keepOutbox();
    return !names || body.places.length > 0;
  } catch {
    return true; // it is away again
  }
}
function enqueue(path, body) {
  strokes += 1;
  outbox.push({
    path,
    names: body.places?.map(imageName),
    body: {
      ...body,
      by: tab,
      listing: store.state.listing,
      stroke: `${tab.slice(0, 8)}-${Date.now()}-${Math.random().toString(36).slice(2, 8)}`,
    },
  });
  keepOutbox();
  send();
}
export function label(places, value) {
  if (!places.length) return;
  for (const place of places) store.label[place] = value;
  enqueue("label", {places, value});
  const what = value === SKIPPED ? "skipped" : value === NONE ? "without a label" : className(value);
  say(places.length === 1 ? `${imageName(places[0])}: ${what}` : `${places.length} images: ${what}`);
  changed();
}
export const undo = () => enqueue("undo", {});
export const begin = () => refresh().then(() => outbox.length && send());
