"""What EngineCore and Scheduler gain: controller, pause, versioned cache."""
