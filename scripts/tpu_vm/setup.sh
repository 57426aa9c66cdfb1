#!/usr/bin/env bash
# Runs on a TPU worker as root, sent by tpu-vm: releases below /opt/jaxserve, settings in /etc/jaxserve, one unit.
#
#   setup.sh install RELEASE SOURCE EXTRAS   a new environment; 'current' names it, 'previous' the one before
#   setup.sh configure                       take over what tpu-vm sent: arguments, environment, keys
#   setup.sh restart | rollback
#   setup.sh ready SECONDS                   wait until the server answers
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=${JAXSERVE_SETUP_ROOT:-} # another root directory, for tests
OPT=$ROOT/opt/jaxserve
ETC=$ROOT/etc/jaxserve
PYTHON=3.12 # the images' own may be older than jaxserve needs; uv brings this one
ADDRESS=127.0.0.1:8000

point() { # LINK TARGET, atomically
  ln -sfn "$2" "$1.new"
  mv -T "$1.new" "$1"
}

install() {
  local release=$OPT/releases/$1 source=$2 extras=$3
  id jaxserve >/dev/null 2>&1 || useradd --system --home-dir /var/lib/jaxserve --shell /usr/sbin/nologin jaxserve
  mkdir -p "$OPT/releases" "$ETC"
  if [ ! -x "$OPT/uv/bin/uv" ]; then
    python3 -m venv "$OPT/uv" 2>/dev/null || {
      apt-get update -q && apt-get install -qy python3-venv
      python3 -m venv "$OPT/uv"
    }
    "$OPT/uv/bin/pip" install -q uv
  fi
  export UV_PYTHON_INSTALL_DIR=$OPT/python # readable for the service's user; root's home is not
  "$OPT/uv/bin/uv" venv -q --clear --python "$PYTHON" "$release"
  if [ "$source" = checkout ]; then
    rm -rf "$HERE/source" && mkdir "$HERE/source"
    tar -xzf "$HERE/jaxserve.tar.gz" -C "$HERE/source"
    source=$HERE/source
  fi
  "$OPT/uv/bin/uv" pip install -q --python "$release/bin/python" "$(requirement "$source" "$extras")"
  "$release/bin/jaxserve" --version
  cp "$HERE/jaxserve.service" "$ROOT/etc/systemd/system/jaxserve.service"
  systemctl daemon-reload
  [ ! -e "$OPT/current" ] || point "$OPT/previous" "$(readlink "$OPT/current")"
  point "$OPT/current" "$release"
  prune
}

requirement() { # SOURCE EXTRAS: as pip spells it
  case $1 in
    /*) echo "jaxserve[$2] @ file://$1" ;;
    *://*) echo "jaxserve[$2] @ $1" ;;
    *) echo "jaxserve[$2]==${1#jaxserve==}" ;;
  esac
}

prune() { # all but the current release and the one before
  local release
  for release in "$OPT"/releases/*; do
    [ "$release" = "$(readlink "$OPT/current")" ] || [ "$release" = "$(readlink "$OPT/previous" || true)" ] ||
      rm -rf "$release"
  done
}

configure() {
  mkdir -p "$ETC"
  command install -o jaxserve -m 500 "$HERE/serve" "$ETC/serve"
  command install -m 600 "$HERE/environment" "$ETC/environment" # systemd reads it as root
  command install -o jaxserve -m 400 "$HERE/api_keys" "$ETC/api_keys"
  rm -f "$HERE/environment" "$HERE/api_keys"
}

restart() {
  [ -e "$ETC/serve" ] || { echo "Nothing to start: run 'tpu-vm serve' first." >&2; exit 1; }
  systemctl reset-failed jaxserve 2>/dev/null || true
  systemctl enable -q jaxserve
  systemctl restart jaxserve
}

rollback() {
  local current previous
  previous=$(readlink "$OPT/previous") || { echo "There is no release before this one." >&2; exit 1; }
  current=$(readlink "$OPT/current")
  point "$OPT/current" "$previous"
  point "$OPT/previous" "$current"
}

answers() { # with or without TLS; the certificate names another host than this
  curl -fs -o /dev/null "http://$ADDRESS/health" || curl -fsk -o /dev/null "https://$ADDRESS/health"
}

ready() {
  local deadline=$((SECONDS + $1))
  until answers; do
    if ! systemctl is-active -q jaxserve || [ "$SECONDS" -ge "$deadline" ]; then
      journalctl --no-pager --unit=jaxserve --lines=40 >&2
      exit 1
    fi
    sleep 2
  done
  echo "The server is ready, on $ADDRESS of this worker."
}

case ${1:-} in
  install | configure | restart | rollback | ready) "$@" ;;
  *) echo "setup.sh: install, configure, restart, rollback or ready, got '${1:-}'" >&2; exit 2 ;;
esac
