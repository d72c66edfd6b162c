"""`paceline bench`: the lab's commands."""

import typer
from paceline.scripts.lab.command_fleet import fleet_command
from paceline.scripts.lab.command_link import link
from paceline.scripts.lab.command_predictor import predictor
from paceline.scripts.lab.command_rtt import rtt
from paceline.scripts.lab.command_trace import trace

app = typer.Typer(no_args_is_help=True, help="Measure policies, links and engines.")
app.command("predictor")(predictor)
app.command("rtt")(rtt)
app.command("link")(link)
app.command("trace")(trace)
app.command("fleet")(fleet_command)
