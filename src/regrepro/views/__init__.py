"""Views: what the judge found, shown to people. They read verdicts and record and decide nothing."""
