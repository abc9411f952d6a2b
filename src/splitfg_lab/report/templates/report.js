"use strict";

// The theme is set before anything is drawn, so that the page does not flash.
const THEME_KEY = "splitfg-theme";
const root = document.documentElement;
const systemDark = window.matchMedia("(prefers-color-scheme: dark)");

function storedTheme() {
  try {
    return localStorage.getItem(THEME_KEY);
  } catch {
    return null; // a page opened from disk may have no storage
  }
}

function storeTheme(theme) {
  try {
    localStorage.setItem(THEME_KEY, theme);
  } catch {
    // then it lasts until the page is closed
  }
}

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches;
}

if (["light", "dark"].includes(storedTheme())) root.dataset.theme = storedTheme();

function setUpTheme() {
  const button = document.querySelector("[data-theme-toggle]");
  const name = button.querySelector("[data-theme-name]");
  const show = () => {
    name.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${name.textContent.toLowerCase()} colours`);
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    storeTheme(root.dataset.theme);
    show();
  });
  systemDark.addEventListener("change", show);
  show();
}

// A header cycles through ascending, descending and the table's own order; empty cells stay last.
const NEXT_ORDER = { none: "ascending", ascending: "descending", descending: "none" };

function sortKey(row, column) {
  const cell = row.cells[column];
  if ("missing" in cell.dataset) return null;
  return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.trim();
}

function compareKeys(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

function sortedRows(rows, column, order) {
  if (order === "none") return rows;
  const sign = order === "ascending" ? 1 : -1;
  const keyed = rows.map((row) => ({ row, key: sortKey(row, column) }));
  keyed.sort((a, b) => {
    if (a.key === null || b.key === null) return (a.key === null) - (b.key === null);
    return sign * compareKeys(a.key, b.key);
  });
  return keyed.map(({ row }) => row);
}

function setUpSorting(table) {
  const rows = [...table.tBodies[0].rows];
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    header.querySelector("[data-sort-button]").addEventListener("click", () => {
      const order = NEXT_ORDER[header.getAttribute("aria-sort")];
      headers.forEach((other) => other.setAttribute("aria-sort", "none"));
      header.setAttribute("aria-sort", order);
      table.tBodies[0].append(...sortedRows(rows, column, order));
    });
  });
}

// A saved figure stands on its own: colours of the current theme written out, a background, a size.
function standaloneSvg(drawing) {
  const svg = drawing.querySelector("svg").cloneNode(true);
  const style = getComputedStyle(root);
  const [, , width, height] = svg.getAttribute("viewBox").split(" ");
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  const background = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  background.setAttribute("width", "100%");
  background.setAttribute("height", "100%");
  background.setAttribute("fill", style.getPropertyValue("--paper").trim());
  svg.prepend(background);
  return new XMLSerializer()
    .serializeToString(svg)
    .replace(/var\((--[\w-]+), (#\w+)\)/g, (_, name, fallback) => style.getPropertyValue(name).trim() || fallback);
}

function svgUrl(text) {
  return `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
}

async function pngUrl(text) {
  const image = new Image();
  image.src = svgUrl(text);
  await image.decode();
  const scale = 3; // sharp enough for a slide
  const canvas = document.createElement("canvas");
  canvas.width = image.width * scale;
  canvas.height = image.height * scale;
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/png");
}

function setUpSaving(line) {
  const drawing = line.parentElement.querySelector(".drawing");
  line.hidden = false;
  line.querySelectorAll("[data-format]").forEach((button) => {
    button.addEventListener("click", async () => {
      const text = standaloneSvg(drawing);
      const link = document.createElement("a");
      link.href = button.dataset.format === "png" ? await pngUrl(text) : svgUrl(text);
      link.download = `${line.dataset.save}.${button.dataset.format}`;
      link.click();
    });
  });
}

// The contents mark the section that the reader has reached: the last one that begins in the upper third of the window
// or above it.
function setUpContents() {
  const fold = document.querySelector("[data-toc]");
  if (window.matchMedia("(max-width: 40rem)").matches) fold.removeAttribute("open");
  const here = document.querySelector("[data-here]");
  const links = [...document.querySelectorAll(".toc a")];
  const sections = links.map((link) => document.querySelector(link.getAttribute("href")));
  let current = null;
  const mark = () => {
    const above = (section) => section.getBoundingClientRect().top < window.innerHeight / 3;
    const reached = Math.max(0, sections.findLastIndex(above));
    if (reached === current) return;
    current = reached;
    links.forEach((link) => link.removeAttribute("aria-current"));
    links[reached].setAttribute("aria-current", "true");
    here.textContent = links[reached].textContent;
  };
  document.addEventListener("scroll", mark, { passive: true });
  window.addEventListener("resize", mark);
  mark();
}

document.addEventListener("DOMContentLoaded", () => {
  setUpTheme();
  setUpContents();
  document.querySelectorAll("table.sortable").forEach(setUpSorting);
  document.querySelectorAll("[data-save]").forEach(setUpSaving);
});

window.addEventListener("beforeprint", () => {
  document.querySelectorAll("details").forEach((details) => details.setAttribute("open", ""));
});
