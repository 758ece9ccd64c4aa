"""The rollout engine on a real model beside the engines that people would use on a CPU."""
