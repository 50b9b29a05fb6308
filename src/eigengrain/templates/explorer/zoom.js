// Enlarge a picture in a button of the class "zoom"; a click or the Escape key closes it.
() => {
  const dialog = document.createElement("dialog");
  const picture = dialog.appendChild(document.createElement("img"));
  dialog.id = "zoom";
  dialog.addEventListener("click", () => dialog.close());
  (document.querySelector(".gradio-container") || document.body).append(dialog);
  document.addEventListener("click", (event) => {
    const small = event.target.closest?.(".zoom")?.querySelector("img");
    if (!small) return;
    [picture.src, picture.alt] = [small.src, small.alt];
    dialog.showModal();
  });
}
