"""What tests share: tiny models, servers, engines, stand-ins."""
