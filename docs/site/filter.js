// docs/supported.md: a box that leaves the rows with all of the words typed into it
const article = document.querySelector("article");
if (location.pathname.endsWith("/supported/") && article) {
  const box = document.createElement("input");
  const found = document.createElement("p");
  box.type = "search";
  box.className = "filter";
  box.placeholder = "Find your model: llama, vit, t5 …";
  box.setAttribute("aria-label", "Find your model");
  found.setAttribute("aria-live", "polite");
  article.querySelector("h1").after(box, found);
  const rows = [...article.querySelectorAll("tbody tr")];
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      left += !row.hidden;
    }
    found.textContent = words.length ? `${left} of ${rows.length} rows` : "";
  });
}
