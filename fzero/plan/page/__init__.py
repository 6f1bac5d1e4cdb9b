"""Renders a plan as one HTML file that opens in any browser, without a network: `fzero plan --html`, `Plan.html`.

The file has the answer in a sentence, the memory and the queues over the time of the step, what else would fit or
would be faster, the program with the cost of each op, the user's own lines with their cost, and the code to paste.

[Note: libraries] The template is written in Jinja, which PyTorch itself requires; it escapes all text. The charts are
Vega-Lite: a chart is a short declarative specification, tooltips and both renderers are built in, and `vl-convert`
delivers Vega, Vega-Lite and Vega-Embed as one script to embed, about 1 MB. Plotly's script is 4.7 MB, most of it for
charts in three dimensions and maps. Bokeh's is of the same size as Vega's, but a page has random identifiers, so two
pages of one plan differ. `vl-convert` belongs to the extra `plan`.

| file | what it does |
|---|---|
| `html_page.py` | `Page`, and its contents: sentences, tables and scripts |
| `chart_data.py` | the memory and the events of a step, reduced to what a screen can show |
| `op_costs.py` | the seconds of each op, and of each line of the user's code |
| `program_listing.py` | the program as nested rows, each with its cost and the user's line |
| `suggestions.py` | `Suggestions`: what a caller adds to a page, such as alternatives that were planned, and code |

`page.html.jinja`, `page.css` and `page.js` are the template, its styles and its charts.
"""
