"""The protocol: two deterministic state machines, standard library only.

No sockets, clocks, threads or arrays: events come in, actions go out.

Where is ...?
  a setting of the protocol, its unit, bounds and default: config.py
  the messages, events and actions: messages.py, events.py, actions.py
  when which fragment is due: schedule.py
  the period of a run whose links are thin or far: tempo.py
  the numbers of the formats on disk and on the wire: formats.py
  how text of a peer or a disk is parsed: safe_json.py
"""
