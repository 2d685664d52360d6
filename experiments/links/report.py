def line(row):
  c=row['checked_mbit']
  return (f"{row['method']}, {row['mbit']:g}: computes {row['computes']:.2%} (least {row['computes_least']:.2%}), merged {row.get('merged',0):.2%} on time {row.get('on_time',0):.2%} "
   f"up {row['bytes_up']/1e6:.3f} down {row['bytes_down']/1e6:.3f} MB/step; link measured {c}; {row['seconds']:.0f} s, load {row['load']:.1f} {row.get('discarded')}")
def table(rows): return '\n'.join(map(line, rows))
