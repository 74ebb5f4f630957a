// Keeps what a browser is known by in a cookie, so that a reload knows who started a run. data: {id}
// On a public host alone; it names nobody and goes with the browser's other cookies.

export default function ({ data }) {
  const secure = location.protocol === "https:" ? "; Secure; SameSite=None; Partitioned" : "; SameSite=Lax"
  document.cookie = `patchlight_visitor=${data.id}; Path=/; Max-Age=604800${secure}`
}
