"""What tests share: proxies, engines, clients, sessions, recorded responses, and checks."""
