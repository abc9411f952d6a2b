"""One-line bugs for a copy of the library, by topic, and the tests that must notice each of them."""

from tools.plant_bugs import estimates, feedback, heads, pulls, ranks, tangents, training

BUGS = (*estimates.BUGS, *tangents.BUGS, *heads.BUGS, *training.BUGS, *feedback.BUGS, *pulls.BUGS, *ranks.BUGS)
