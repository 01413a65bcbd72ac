from quantkv.cli import app

app()
