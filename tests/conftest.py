"""What all tests share."""

import fork_server

fork_server.install()
