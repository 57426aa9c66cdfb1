// The page put together: conversations, chat, settings, the engine's view, the connection, keys and themes.
import { getJSON, hasKey, health, setKey } from "./api.js";
import { buildExamples, Chat } from "./chat.js";
import {
  asMarkdown, currentId, deleteAllConversations, deleteConversation, listConversations, loadConversation,
  newConversation, setCurrentId, titleOf,
} from "./conversations.js";
import { byId, h, icon, iconButton } from "./dom.js";
import { EngineView } from "./engine_view.js";
import { SettingsView } from "./settings.js";
import { readJSON, readText, writeJSON, writeText } from "./storage.js";

const EXAMPLES = [
  "Explain how a KV cache speeds up generation.",
  "Write a haiku about compilers.",
  "Compare TCP and UDP in a table.",
];
const HEALTH_EVERY_MS = 15_000;
const HEALTH_WHEN_AWAY_MS = 2_000;
const wide = matchMedia("(min-width: 1100px)");
const coarse = matchMedia("(pointer: coarse)");

// --- models -----------------------------------------------------------------------------------------------------

const models = byId("model");
let declined = false; // to give a key: asked again only when something is sent

async function loadModels() {
  for (;;) {
    try {
      const { data } = await getJSON("v1/models");
      const chosen = readText("model");
      models.replaceChildren(...data.map(({ id }) => h("option", { value: id, selected: id === chosen }, id)));
      models.disabled = data.length < 2;
      byId("context").textContent = data[0] ? `${data[0].max_model_len.toLocaleString("en")} tokens of context` : "";
      document.title = `${models.value} – jaxserve`;
      return true;
    } catch (error) {
      if (error.status !== 401) return false;
      if (!(await askForKey())) {
        declined = true;
        return false;
      }
    }
  }
}

models.addEventListener("change", () => writeText("model", models.value));

// --- connection -------------------------------------------------------------------------------------------------

const connection = byId("connection");
let healthTimer = null;

async function checkHealth() {
  clearTimeout(healthTimer);
  if (document.hidden) return;
  const state = await health();
  const was = connection.dataset.state;
  connection.dataset.state = state;
  connection.title = { ok: "Connected", dead: "The engine has stopped", away: "No connection" }[state];
  byId("connection-text").textContent = connection.title;
  const banner = byId("banner");
  banner.hidden = state === "ok";
  banner.textContent = state === "dead" ? "The engine has stopped; the server must be started again." : "The server does not answer. Trying again…";
  if (state === "ok" && (was === "away" || (models.options.length === 0 && !declined))) loadModels();
  healthTimer = setTimeout(checkHealth, state === "ok" ? HEALTH_EVERY_MS : HEALTH_WHEN_AWAY_MS);
}

document.addEventListener("visibilitychange", checkHealth);

// --- dialogs ----------------------------------------------------------------------------------------------------

let keyDialog = null;

/** Ask for the API key; whether one was given. Several that ask at once share the dialog. */
function askForKey() {
  keyDialog ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    byId("key-problem").textContent = hasKey() ? "The server does not take this key." : "";
    byId("key").value = "";
    dialog.returnValue = "";
    dialog.addEventListener(
      "close",
      () => {
        keyDialog = null;
        const key = byId("key").value.trim();
        byId("key").value = "";
        const given = dialog.returnValue === "ok" && key !== "";
        if (given) setKey(key, byId("key-remember").checked);
        resolve(given);
      },
      { once: true },
    );
    dialog.showModal();
  });
  return keyDialog;
}

// The policy allows no form to be sent anywhere: dialogs are closed by hand.
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = byId("key");
  if (!/^[\x21-\x7e]+$/.test(field.value.trim())) byId("key-problem").textContent = "A key is printable ASCII text without spaces.";
  else byId("key-dialog").close("ok");
});
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close(""));

function confirmed(question, action) {
  const dialog = byId("confirm-dialog");
  byId("confirm-text").textContent = question;
  byId("confirm-ok").textContent = action;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok"), { once: true });
  });
}

byId("confirm-ok").addEventListener("click", () => byId("confirm-dialog").close("ok"));
byId("confirm-cancel").addEventListener("click", () => byId("confirm-dialog").close(""));

// --- panels -----------------------------------------------------------------------------------------------------

const engineView = new EngineView();
const layout = readJSON("layout", { sidebar: true, panel: matchMedia("(min-width: 1280px)").matches ? "engine" : "" });

/** Show or hide the list and the panel; on narrow screens they lie over the chat, one at a time. */
function arrange(change, focus = false) {
  Object.assign(layout, change);
  const shown = wide.matches ? layout : { sidebar: overlay === "sidebar", panel: overlay === "sidebar" ? "" : overlay };
  document.body.classList.toggle("with-sidebar", shown.sidebar);
  document.body.classList.toggle("with-panel", shown.panel !== "");
  byId("sidebar").inert = !shown.sidebar;
  byId("panel").inert = shown.panel === "";
  byId("scrim").hidden = wide.matches || overlay === "";
  byId("main").inert = !wide.matches && overlay !== "";
  byId("toggle-sidebar").setAttribute("aria-expanded", String(shown.sidebar));
  for (const name of ["engine", "settings"]) {
    byId(`tab-${name}`).setAttribute("aria-selected", String(shown.panel === name));
    byId(`tab-${name}`).tabIndex = shown.panel === name ? 0 : -1;
    byId(`open-${name}`).setAttribute("aria-expanded", String(shown.panel === name));
    byId(name).hidden = shown.panel !== name;
  }
  engineView.setVisible(shown.panel === "engine");
  if (wide.matches) writeJSON("layout", layout);
  if (focus && shown.panel) byId(`tab-${shown.panel}`).focus();
}

let overlay = "";

function open(name, toggle = true) {
  const isSidebar = name === "sidebar";
  if (wide.matches) {
    if (isSidebar) arrange({ sidebar: !layout.sidebar });
    else arrange({ panel: toggle && layout.panel === name ? "" : name }, true);
  } else {
    overlay = toggle && overlay === name ? "" : name;
    arrange({}, true);
    if (overlay === "sidebar") byId("new-chat").focus();
  }
}

function closeOverlay() {
  const opener = overlay === "sidebar" ? "toggle-sidebar" : `open-${overlay}`;
  overlay = "";
  arrange({});
  byId(opener)?.focus();
}

wide.addEventListener("change", () => ((overlay = ""), arrange({})));
byId("scrim").addEventListener("click", closeOverlay);
byId("toggle-sidebar").addEventListener("click", () => open("sidebar"));
byId("close-sidebar").addEventListener("click", () => (wide.matches ? open("sidebar") : closeOverlay()));
byId("close-panel").addEventListener("click", () => {
  if (!wide.matches) return closeOverlay();
  const { panel } = layout;
  arrange({ panel: "" });
  byId(`open-${panel}`).focus();
});
for (const name of ["engine", "settings"]) {
  byId(`open-${name}`).addEventListener("click", () => open(name));
  byId(`tab-${name}`).addEventListener("click", () => open(name, false));
  byId(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") open(name === "engine" ? "settings" : "engine", false);
  });
}

// --- conversations ----------------------------------------------------------------------------------------------

const input = byId("input");
const settingsView = new SettingsView(() => chat.save());
const chat = new Chat({
  model: () => models.value,
  async askForKey() {
    const given = await askForKey();
    if (given) loadModels();
    return given;
  },
  checkSettings: () => settingsView.check(),
  showSetting(name, asking) {
    if (asking || !settingsView.focus(name, true)) return settingsView.focus(name, true);
    open("settings", false);
    return settingsView.focus(name);
  },
  onChange() {
    const { running } = chat;
    byId("send").hidden = running;
    byId("stop").hidden = !running;
    byId("title").textContent = titleOf(chat.chat);
    listChats();
    if (!running && chat.chat.messages.at(-1)?.error?.status === 0) checkHealth();
  },
  onSaved: (saved) => (byId("storage-note").hidden = saved),
  announce: (text) => (byId("live").textContent = text),
});

function showConversation(conversation) {
  chat.show(conversation);
  settingsView.show(conversation.settings);
  setCurrentId(conversation.id);
  listChats();
  if (!coarse.matches) input.focus();
}

let kept = new Map(); // id -> {id, title, updated} of the conversations that are kept
let listed = "";

function readKept() {
  kept = new Map(listConversations().map(({ id, title, updated }) => [id, { id, title, updated }]));
}

function listChats() {
  if (!chat.chat) return;
  const { id: current, title: currentTitle, updated: currentTime, messages } = chat.chat;
  if (messages.length) kept.set(current, { id: current, title: currentTitle, updated: currentTime });
  const all = [...kept.values()].sort((one, other) => other.updated - one.updated);
  const shown = JSON.stringify([all.map(({ id, title }) => [id, title]), chat.chat.id]);
  if (shown === listed) return;
  listed = shown;
  byId("chats").replaceChildren(
    ...all.map((one) => {
      const current = one.id === chat.chat.id;
      const choose = () => {
        if (!current) showConversation(loadConversation(one.id) ?? newConversation());
        if (overlay) closeOverlay();
      };
      return h(
        "li",
        { class: current ? "current" : "" },
        h("button", { type: "button", class: "chat", onclick: choose, "aria-current": current ? "true" : null, title: titleOf(one) }, titleOf(one)),
        iconButton("trash", `Delete “${titleOf(one)}”`, () => removeChat(one)),
      );
    }),
  );
  byId("no-chats").hidden = all.length > 0;
}

async function removeChat(one) {
  if (!(await confirmed(`Delete “${titleOf(one)}”?`, "Delete"))) return;
  if (one.id === chat.chat.id) {
    chat.stop();
    chat.chat.messages = [];
    showConversation(newConversation(chat.chat.settings));
  }
  deleteConversation(one.id);
  kept.delete(one.id);
  listChats();
}

byId("new-chat").addEventListener("click", () => {
  showConversation(newConversation(chat.chat.settings));
  if (overlay) closeOverlay();
  input.focus();
});
byId("clear").addEventListener("click", async () => {
  if (!(await confirmed("Delete all conversations? They are kept in this browser only.", "Delete all"))) return;
  chat.stop();
  chat.chat.messages = [];
  deleteAllConversations();
  kept.clear();
  showConversation(newConversation(chat.chat.settings));
});
byId("export-json").addEventListener("click", () => {
  chat.save();
  download("jaxserve-conversations.json", "application/json", JSON.stringify(listConversations(), null, 2));
});
byId("export-markdown").addEventListener("click", () => {
  download("conversation.md", "text/markdown", asMarkdown(chat.chat));
});

function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

addEventListener("storage", () => {
  readKept(); // another tab wrote
  listChats();
});

// --- composer ---------------------------------------------------------------------------------------------------

function fit() {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight, innerHeight * 0.4)}px`;
}

function submit() {
  const text = input.value;
  if (chat.running || !text.trim()) return;
  input.value = "";
  fit();
  chat.send(text);
}

input.addEventListener("input", fit);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !coarse.matches) {
    event.preventDefault();
    submit();
  } else if (event.key === "ArrowUp" && input.value === "" && !chat.running) {
    event.preventDefault();
    chat.editLast();
  }
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("stop").addEventListener("click", () => {
  chat.stop();
  input.focus();
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.defaultPrevented && !document.querySelector("dialog[open]")) {
    if (chat.running) chat.stop();
    else if (overlay) closeOverlay();
  } else if (event.key === "/" && !/^(?:INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName)) {
    event.preventDefault();
    input.focus();
  }
});

// --- theme ------------------------------------------------------------------------------------------------------

const THEMES = { auto: "light", light: "dark", dark: "auto" };

function showTheme() {
  const theme = document.documentElement.dataset.theme ?? "auto";
  const button = byId("theme");
  button.replaceChildren(icon({ auto: "auto", light: "sun", dark: "moon" }[theme]));
  button.title = `Theme: ${theme}`;
  button.setAttribute("aria-label", `Theme: ${theme}. Change it`);
}

byId("theme").addEventListener("click", () => {
  const next = THEMES[document.documentElement.dataset.theme ?? "auto"];
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("jaxserve:theme", next); // theme.js reads it, before modules run
  } catch {
    // Storage is blocked: it holds until the page is left.
  }
  showTheme();
});

// --- start ------------------------------------------------------------------------------------------------------

buildExamples(EXAMPLES, (text) => {
  input.value = text;
  submit();
});
byId("hint").hidden = coarse.matches;
showTheme();
arrange({});
readKept();
showConversation(loadConversation(currentId() ?? "") ?? newConversation(listConversations()[0]?.settings));
checkHealth();
