"""What EngineCore and Scheduler gain: gate, pause, versioned cache."""
