// Keys and the line that tells what a token is. Every page works without it.
"use strict";
const line = document.getElementById("token");
const tokens = Array.from(document.querySelectorAll(".t"));
let at = -1;

function tell(token) {
  line.hidden = false;
  line.textContent = token.title;
}

function choose(number) {
  if (!tokens.length) return;
  if (at >= 0) tokens[at].classList.remove("chosen");
  at = Math.max(0, Math.min(tokens.length - 1, number));
  tokens[at].classList.add("chosen");
  tokens[at].scrollIntoView({ block: "nearest" });
  tell(tokens[at]);
}

document.addEventListener("mouseover", (event) => {
  const token = event.target.closest(".t");
  if (token) tell(token);
});
document.addEventListener("click", (event) => {
  const token = event.target.closest(".t");
  if (token) choose(tokens.indexOf(token));
});
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const link = { j: "next", k: "previous" }[event.key];
  if (link) document.getElementById(link)?.click();
  else if (event.key === "ArrowRight" && tokens.length) { choose(at + 1); event.preventDefault(); }
  else if (event.key === "ArrowLeft" && tokens.length) { choose(at - 1); event.preventDefault(); }
  else if (event.key === "/") { document.getElementById("go-n")?.focus(); event.preventDefault(); }
});

const live = document.getElementById("live");
if (live?.dataset.refresh) {
  const timer = setInterval(async () => {
    try {
      const page = new DOMParser().parseFromString(await (await fetch("/build")).text(), "text/html");
      const fresh = page.getElementById("live");
      if (!fresh) return;
      document.title = page.title;
      live.replaceChildren(...fresh.childNodes);
      if (!fresh.dataset.refresh) clearInterval(timer);
    } catch { /* the viewer may have ended: what is shown stays */ }
  }, 1000 * Number(live.dataset.refresh));
}
