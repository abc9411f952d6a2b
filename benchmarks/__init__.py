"""Speed and memory of a Split-FG step against the strongest ordinary alternative, as ratios within one run."""
